"""Runners: the callables that stand in the place of Dynamo's graphs."""
