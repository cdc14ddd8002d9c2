"""What a decode graph's runner computes beside the graph."""
