"""Reports for callers: what a model's attentions became, statistics, traces, progress."""
