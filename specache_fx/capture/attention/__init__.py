"""Attention: found in a graph by running it on numbers, and put in one form."""
