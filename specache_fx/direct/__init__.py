"""Decode steps without Dynamo: recorded once, and guarded by what the model's modules hold."""
