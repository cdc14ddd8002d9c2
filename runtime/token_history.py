"""`TokenHistory`: the tokens of a session, and what followed where the newest of them stood before."""

from __future__ import annotations

import torch

# So many of the newest tokens are looked for, and fewer where they never stood in that order before.
MOST_NGRAM = 4
_UNKNOWN = -1  # a token that no graph was seen to take; no token equals it


class TokenHistory:
    """Token ids `[batch, kv_len]` of one session, on its device.

    A place is unknown where the tokens did not come through a rewritten graph: a cache that was taken over.

    Args:
        device: Where the session lives.
    """

    def __init__(self, device: torch.device) -> None:
        self._rows = torch.empty((0, 0), dtype=torch.int32, device=device)
        self._length = 0

    def append(self, tokens: torch.Tensor, kv_len: int) -> None:
        """Put tokens `[batch, q_len]` behind place `kv_len`; what comes before and was never given is unknown."""
        batch, q_len = tokens.shape
        needed = kv_len + q_len
        if self._rows.shape[0] != batch or self._rows.shape[1] < needed:
            # The rows of a prompt; then an eighth more each time.
            room = needed if not self._length else max(needed, self._length + self._length // 8 + 64)
            grown = self._rows.new_full((batch, room), _UNKNOWN)
            if self._rows.shape[0] == batch:
                grown[:, : self._length] = self._rows[:, : self._length]
            self._rows = grown
        elif self._length < kv_len:
            self._rows[:, self._length : kv_len] = _UNKNOWN
        self._rows[:, kv_len:needed] = tokens
        self._length = needed

    def learn(self, tokens: torch.Tensor) -> None:
        """Put the tokens `[batch, prompt_len]` of a prompt that a plain model read, before those that are there."""
        self._rows[:, : tokens.shape[1]] = tokens

    def crop(self, kv_len: int) -> None:
        """Forget the tokens from `kv_len` on."""
        self._length = min(self._length, kv_len)

    def take(self, source: TokenHistory, rows: torch.Tensor) -> None:
        """Hold what `source` holds, of its batch rows `rows`, int64 `[batch]` on the device."""
        if source._rows.shape[0]:
            self._rows, self._length = source._rows.index_select(0, rows), source._length

    def following(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The token that followed where the newest tokens stood last: of the longest match, the latest place.

        Nothing waits for the device. One to four of the newest tokens are compared.

        Returns:
            int32 `[batch]` and bool `[batch]`: whether there is such a place; the token is any where there is none.
        """
        known = self._rows[:, : self._length]
        places = self._length - 1  # where an n-gram may end that something follows
        if places < 1:
            return known.new_zeros(len(known)), known.new_zeros(len(known), dtype=torch.bool)
        matched = torch.zeros_like(known[:, :places])
        going_on = known[:, 1:] != _UNKNOWN  # what follows there is to be known
        for back in range(min(MOST_NGRAM, places)):
            newest = known[:, places - back, None]
            same = (known[:, : places - back] == newest) & (newest != _UNKNOWN)
            going_on[:, :back] = False
            going_on[:, back:] &= same
            matched += going_on
        # The longest match counts first, then the latest place.
        numbers = torch.arange(places, device=known.device)
        best = (matched.to(torch.int64) * places + numbers).argmax(-1, keepdim=True)
        found = matched.gather(1, best) > 0
        return known.gather(1, best + 1).squeeze(1), found.squeeze(1)
