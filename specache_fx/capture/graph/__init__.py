"""Graphs: Dynamo's as functional ATen, in one spelling, and what reads and edits them."""
