"""What Dynamo does for us beyond its public interface: hooks, graph breaks, traces that are made again."""
