"""What reads compilers' output, and benchmarks for those who work on jattn; outside of the wheel. See README.md."""
