"""Tokens, positions, lengths and masks: found among a graph's inputs by dependence."""
