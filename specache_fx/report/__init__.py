"""Reports: what a model's attentions became, memory plans, the demo, progress."""
