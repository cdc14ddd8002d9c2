"""The laboratory of specache_fx: one runner, `Method x Workload -> Record`. See benchmarks/README.md."""
