"""C++ that this package calls on the CPU, and products where it can't be built."""
