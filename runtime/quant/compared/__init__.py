"""Quantisers of other papers, for comparisons: no fast kernel reads their codes."""
