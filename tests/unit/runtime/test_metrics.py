"""What a session counts of its tokens: at once or later, the same."""

from __future__ import annotations

import pytest
import torch

from specache_fx._log import forget_warnings
from specache_fx.runtime.session.metrics import Metrics

STEPS = 300  # some more than are summed together


@pytest.mark.parametrize("keep_steps", [False, True])
def test_tokens_are_counted_whenever_somebody_asks(keep_steps: bool) -> None:
    counted = Metrics(torch.device("cpu"), keep_steps=keep_steps)
    generator = torch.Generator().manual_seed(0)
    hits = checks = needed = 0
    for step in range(STEPS):
        missed = torch.rand(4, generator=generator) < 0.5
        counted.count_token(missed)  # of a step that broke off
        counted.step_counts(4).add_(7)
        counted.begin_step()
        if step % 4 != 1:  # a step without a guess
            counted.count_token(missed)
            hits, checks = hits + int((~missed).sum()), checks + 4
        if step % 3 != 2:  # a step of a layer that has nothing quantised yet
            counted.step_counts(4)[2, 1] += step
            needed += step
        counted.end_step(step)
        for _ in range(2):
            assert (counted.hits.token_hits, counted.hits.token_checks) == (hits, checks)
            assert (counted.hits.topk_hits, counted.hits.topk_needed) == (0, needed)
    assert counted.steps == STEPS
    assert len(counted.series()) == (STEPS if keep_steps else 0)


@pytest.mark.parametrize("keep_steps", [False, True])
def test_hits_are_split_by_whether_the_token_was_right(keep_steps: bool) -> None:
    counted = Metrics(torch.device("cpu"), keep_steps=keep_steps)
    generator = torch.Generator().manual_seed(1)
    right, wrong = torch.zeros(6), torch.zeros(6)
    runs, longest = [0] * 3, 0
    for step in range(STEPS):
        missed = torch.rand(3, generator=generator) < 0.7
        if 240 <= step < 290:  # the longest run is of two sums
            missed[:] = True
        topk = torch.randint(9, (3, 4), generator=generator).double()
        counted.step_counts(3).add_(topk)
        if step % 9:  # else a step without a guess, which neither ends a run nor is part of one
            counted.count_token(missed)
            for row, miss in enumerate(missed.tolist()):
                (wrong if miss else right).add_(torch.tensor([not miss, 1.0, *topk[row]]))
                runs[row] = runs[row] + 1 if miss else 0
                longest = max(longest, runs[row])
        counted.end_step(step)
        found = counted.split()
        assert list(found.right) == right.tolist()
        assert list(found.wrong) == wrong.tolist()
        assert found.longest_miss_run == longest
        if step % 9:
            series = counted.series()
            assert not keep_steps or list(series[-1].hits[2:]) == topk.sum(0).tolist()
    assert longest > 40


def test_batch_may_change_its_size() -> None:
    counted = Metrics(torch.device("cpu"))
    for rows in (3, 3, 2, 2, 2):
        counted.count_token(torch.ones(rows, dtype=torch.bool))
        counted.step_counts(rows)[:, 1] += 1
        counted.end_step(0)
    found = counted.split()
    assert (found.wrong.token_checks, found.wrong.topk_needed, found.right.token_checks) == (12, 12, 0)
    assert found.longest_miss_run == 3  # rows of another batch are other sequences


@pytest.mark.parametrize(("hits_in_ten", "said"), [(0, True), (2, False)])
def test_hint_is_given_once_where_nearly_nothing_is_guessed(
    hits_in_ten: int, said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    forget_warnings()
    for _ in range(2):
        counted = Metrics(torch.device("cpu"))
        for step in range(70):
            counted.count_token(torch.tensor([step % 10 >= hits_in_ten]))
            counted.end_step(step)
        counted.split()
    hints = [message for message in caplog.messages if "speculative tokens are right" in message]
    assert len(hints) == said
    assert all("on_miss='refetch'" in hint for hint in hints)
