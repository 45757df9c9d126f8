"""What reads compilers' output, and benchmarks for who works on jattn; outside of the wheel. See README.md."""
