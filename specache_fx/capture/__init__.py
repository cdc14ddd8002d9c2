"""From Dynamo's graph to functional ATen, and to a frozen `Program`."""
