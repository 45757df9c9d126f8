"""Tools that read compilers' output, and benchmarks for developers; not part of the wheel. See README.md."""
