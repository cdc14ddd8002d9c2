"""From Dynamo's graph to functional ATen."""
