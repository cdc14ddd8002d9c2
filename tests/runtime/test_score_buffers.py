"""Score buffers: one for all layers in turn, never one that is in use."""

from __future__ import annotations

import ctypes

import torch

from specache_fx.runtime.score_buffers import ScoreBuffers


def test_what_is_given_back_is_taken_again_as_the_context_grows() -> None:
    buffers = ScoreBuffers()
    first = buffers.take((1, 2, 4, 100))
    address = first.data_ptr()
    buffers.give_back(first)
    for length in range(100, 112):
        scores = buffers.take((1, 2, 4, length))
        assert scores.shape == (1, 2, 4, length) and scores.dtype == torch.float32 and scores.is_contiguous()
        assert scores.data_ptr() == address
        buffers.give_back(scores)
    longer = buffers.take((1, 2, 4, 200))
    assert longer.shape == (1, 2, 4, 200) and longer.data_ptr() != address


def test_two_that_are_in_use_share_nothing() -> None:
    buffers = ScoreBuffers()
    first, second = buffers.take((2, 1, 1, 50)), buffers.take((2, 1, 1, 50))
    first.zero_()
    second.fill_(1)
    assert not first.any()
    buffers.give_back(first)
    buffers.give_back(second)
    third, fourth = buffers.take((2, 1, 1, 50)), buffers.take((2, 1, 1, 50))
    assert {third.data_ptr(), fourth.data_ptr()} == {first.data_ptr(), second.data_ptr()}


def test_memory_is_taken_in_one_mode_and_used_in_another() -> None:
    buffers = ScoreBuffers()
    with torch.inference_mode():
        buffers.give_back(buffers.take((1, 1, 1, 8)))
    again = buffers.take((1, 1, 1, 8))
    (ctypes.c_float * 8).from_address(again.data_ptr())[:] = [*range(8)]  # as the kernel writes
    assert again.topk(2).indices.tolist() == [[[[7, 6]]]]
