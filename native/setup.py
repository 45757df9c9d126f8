"""Builds the kernels with the system's C++ compiler against the headers that come with jaxlib."""

import shutil

import jax
from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext


class Library(build_ext):
    """A library loaded by name, independent of Python."""

    def get_ext_filename(self, fullname):
        return f"{fullname.replace('.', '/')}.so"

    def build_extensions(self):
        compiler = self.compiler.compiler_so_cxx[0]
        if shutil.which(compiler) is None:
            raise SystemExit(
                f"jattn-native is compiled from C++, but there is no compiler {compiler!r}: install GCC 12 or newer or "
                "Clang (Debian and Ubuntu: apt-get install g++; macOS: xcode-select --install), or name one in CXX"
            )
        super().build_extensions()


class Wheel(bdist_wheel):
    """One wheel for all Python versions on a platform."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(
    cmdclass={"build_ext": Library, "bdist_wheel": Wheel},
    ext_modules=[
        Extension(
            "jattn_native._attention",
            ["src/attention.cc"],
            depends=["src/kernel.inc"],
            include_dirs=[jax.ffi.include_dir()],
            language="c++",
            # Sums keep their order: NaN and -inf are meaningful here.
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-g0",
                "-fno-math-errno",
                "-fno-trapping-math",
                "-ffp-contract=fast",
                "-w",
            ],
        )
    ],
)
