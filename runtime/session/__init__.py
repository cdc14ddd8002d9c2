"""Sessions: the layers of one generation, who owns them, and what is counted."""
