"""C++ that this package calls on the CPU, each library by a module of its own."""
