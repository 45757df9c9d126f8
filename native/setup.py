"""Builds the kernels with the system's C++ compiler against the headers that come with jaxlib."""

import jax
from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "jattn_native._attention",
            ["src/attention.cc"],
            depends=["src/kernel.inc"],
            include_dirs=[jax.ffi.include_dir()],
            language="c++",
            # Sums keep their order: NaN and -inf mean something here.
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-fno-math-errno",
                "-fno-trapping-math",
                "-ffp-contract=fast",
                "-w",
            ],
        )
    ]
)
