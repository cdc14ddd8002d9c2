"""The parts of a step at run time: sessions, caches, kernels, copies."""
