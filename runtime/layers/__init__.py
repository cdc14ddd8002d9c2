"""One layer's cache: codes, window, sinks and masks."""
