"""`TokenHistory`: the tokens of a session, and the followers of earlier occurrences of the newest n-gram."""

from __future__ import annotations

import torch

from specache_fx.runtime.native import graph_ops

# So many of the newest tokens are looked for, and fewer where they never stood in that order before.
MOST_NGRAM = 4
_UNKNOWN = -1  # a token that no graph was seen to take, or padding
_NONE = -2  # equals no token, nor an unknown one
_FRONT = MOST_NGRAM - 1


class TokenHistory:
    """Token ids `[batch, kv_len]` of one session, on its device.

    A place is unknown where the tokens did not come through a rewritten graph: a cache that was taken over. So is one
    under padding.

    Args:
        device: Where the session lives.
    """

    def __init__(self, device: torch.device) -> None:
        # Before the first token so many unknown ones that an n-gram can end with it.
        self._rows = torch.empty((0, _FRONT), dtype=torch.int32, device=device)
        self._length = 0

    def append(self, tokens: torch.Tensor, kv_len: int) -> None:
        """Put tokens `[batch, q_len]` behind place `kv_len`; earlier tokens that were never given are unknown."""
        batch, q_len = tokens.shape
        length, start = kv_len + q_len, kv_len + _FRONT
        if self._rows.shape[0] != batch or self._rows.shape[1] < length + _FRONT:
            # The rows of a prompt; then an eighth more each time.
            room = length if not self._length else max(length, self._length + self._length // 8 + 64)
            grown = self._rows.new_full((batch, room + _FRONT), _UNKNOWN)
            if self._rows.shape[0] == batch:
                held = self._length + _FRONT
                grown[:, :held] = self._rows[:, :held]
            self._rows = grown
        elif self._length < kv_len:
            self._rows[:, self._length + _FRONT : start] = _UNKNOWN
        self._rows[:, start : start + q_len] = tokens
        self._length = length

    @property
    def held(self) -> torch.Tensor:
        """The tokens, int32 `[batch, tokens]`; -1 where one is unknown. A view."""
        return self._rows[:, _FRONT : _FRONT + self._length]

    def differ(self, tokens: torch.Tensor) -> int | None:
        """The first place where `tokens`, `[batch, kv_len]`, are others than those known in any row; None for none."""
        held = self.held
        if not len(held):  # no graph took tokens
            return None
        known = tokens[:, : held.shape[1]]
        wrong = ((held[:, : known.shape[1]] != known) & (held[:, : known.shape[1]] != _UNKNOWN)).any(0)
        return int(wrong.to(torch.uint8).argmax()) if bool(wrong.any()) else None

    def learn(self, tokens: torch.Tensor) -> None:
        """Put the tokens `[batch, prompt_len]` of a prompt that a plain model read, before those that are there."""
        self._rows[:, _FRONT : _FRONT + tokens.shape[1]] = tokens

    def hide(self, real: torch.Tensor) -> None:
        """Forget the tokens under padding, where `real`, bool `[batch, kv_len]`, is False: their ids mean nothing."""
        held = self.held
        if len(held):
            held.masked_fill_(~real[:, : self._length], _UNKNOWN)

    def crop(self, kv_len: int) -> None:
        """Forget the tokens from `kv_len` on."""
        self._length = min(self._length, kv_len)

    def reorder(self, rows: torch.Tensor) -> None:
        """Set batch row i to the former row `rows[i]`, int64 `[batch]` on the device."""
        if self._rows.shape[0]:
            self._rows = self._rows.index_select(0, rows)

    def following(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The token that followed where the newest tokens stood last: of the longest match, the latest place.

        Nothing waits for the device. One to four of the newest tokens are compared.

        Returns:
            int32 `[batch]` and bool `[batch]`: whether there is such a place; the token is any where there is none.
        """
        rows = self._rows
        if rows.device.type == "cpu" and graph_ops.load() is not None:
            found: tuple[torch.Tensor, torch.Tensor] = torch.ops.specache.following(
                rows, self._length, MOST_NGRAM, _UNKNOWN
            )
            return found
        places = self._length - 1  # where an n-gram may end that something follows
        if places < 1:
            return rows.new_zeros(len(rows)), rows.new_zeros(len(rows), dtype=torch.bool)
        newest = rows[:, self._length - 1 : self._length + _FRONT]
        newest = newest.masked_fill(newest == _UNKNOWN, _NONE)
        matched = torch.zeros(
            (len(rows), places), dtype=torch.uint8, device=rows.device
        )  # tokens, the last ones
        for i in range(MOST_NGRAM):
            matched.add_(1).mul_(rows[:, i : i + places] == newest[:, i, None])
        matched.mul_(
            rows[:, _FRONT + 1 : _FRONT + 1 + places] != _UNKNOWN
        )  # what follows there is to be known
        # The longest match counts first, then the latest place.
        numbers = torch.arange(places, dtype=torch.int32, device=rows.device)
        greatest, best = torch.add(numbers, matched, alpha=places).max(-1, keepdim=True)
        return rows.gather(1, best + (_FRONT + 1)).squeeze(1), (greatest >= places).squeeze(1)
