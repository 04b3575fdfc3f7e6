"""Builds fsdp_c._C: every C file under csrc/ in one abi3 extension module, with setuptools alone.

torch is not needed here: its symbols are found when the module is imported.

Environment: FSDP_C_WERROR=1 makes warnings errors, FSDP_C_OPT="-O0 -g" replaces the optimisation flags,
FSDP_C_SANITIZE="address,undefined" instruments the module, FSDP_C_JOBS sets how many files compile at once.
"""

import json
import os
import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# [Note: exact arithmetic] Results are compared with torch's bit for bit, so no product and sum may be fused.
COMPILE_FLAGS = [
    "-std=c11",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fexceptions",
    "-fvisibility=hidden",
    "-pthread",
    "-MMD",
]
LINK_FLAGS = ["-pthread", "-ldl", "-lm"]
STRICT_FLAGS = ["-Wall", "-Wextra", "-Wshadow", "-Wstrict-prototypes", "-Wmissing-prototypes", "-Werror"]


def flags_from_environment() -> tuple[list[str], list[str]]:
    """Compile and link flags that the environment asks for."""
    compile_flags = shlex.split(os.environ.get("FSDP_C_OPT", "-O3"))
    link_flags: list[str] = []
    if os.environ.get("FSDP_C_WERROR", "0") not in ("", "0"):
        compile_flags += STRICT_FLAGS
    if sanitizers := os.environ.get("FSDP_C_SANITIZE"):
        compile_flags += [f"-fsanitize={sanitizers}", "-fno-omit-frame-pointer", "-g"]
        link_flags += [f"-fsanitize={sanitizers}"]
    return compile_flags, link_flags


def c_sources() -> list[str]:
    """The C files of the extension; files named after CUDA are built apart from it."""
    return sorted(path.as_posix() for path in Path("csrc").rglob("*.c") if "cuda" not in path.as_posix())


def headers_of(depfile: Path) -> list[str]:
    """The files an object was made from, as the compiler's -MMD wrote them down."""
    return depfile.read_text().replace("\\\n", " ").partition(":")[2].split()


def is_stale(target: Path, inputs: list[str]) -> bool:
    """True if ``target`` is missing or older than any input, or an input has gone."""
    if not target.exists():
        return True
    built = target.stat().st_mtime_ns
    return any(not os.path.exists(name) or os.stat(name).st_mtime_ns > built for name in inputs)


class IncrementalBuild(build_ext):
    """build_ext that compiles only what changed, headers and flags included, several files at once."""

    def build_extension(self, ext: Extension) -> None:
        """Compile the stale sources of ``ext`` and link them when anything is newer than the module."""
        target = Path(self.get_ext_fullpath(ext.name))
        folder = Path(self.build_temp)
        self.forget_objects_of_other_flags(ext, folder)
        objects = {source: folder / Path(source).with_suffix(".o") for source in ext.sources}
        stale = [source for source, obj in objects.items() if self.force or self.object_is_stale(source, obj)]
        with ThreadPoolExecutor(int(os.environ.get("FSDP_C_JOBS", min(os.cpu_count() or 1, 8)))) as pool:
            list(pool.map(lambda source: self.compile_one(ext, source), stale))
        if stale or is_stale(target, [str(obj) for obj in objects.values()]):
            target.parent.mkdir(parents=True, exist_ok=True)
            self.compiler.link_shared_object(
                [str(obj) for obj in objects.values()],
                str(target),
                extra_postargs=ext.extra_link_args,
                build_temp=self.build_temp,
                target_lang="c",
            )

    def object_is_stale(self, source: str, obj: Path) -> bool:
        """True unless the object is newer than its source and every header that went into it."""
        depfile = obj.with_suffix(".d")
        return not depfile.exists() or is_stale(obj, [source, *headers_of(depfile)])

    def compile_one(self, ext: Extension, source: str) -> None:
        """Compile one source; an error of the compiler ends the build."""
        self.compiler.compile(
            [source],
            output_dir=self.build_temp,
            macros=ext.define_macros,
            include_dirs=ext.include_dirs,
            extra_postargs=ext.extra_compile_args,
        )

    def forget_objects_of_other_flags(self, ext: Extension, folder: Path) -> None:
        """Remove objects built by another command line: their times say nothing about it."""
        command = json.dumps(
            [self.compiler.compiler_so, ext.define_macros, ext.extra_compile_args, ext.extra_link_args]
        )
        stamp = folder / "flags.json"
        if stamp.exists() and stamp.read_text() == command:
            return
        for obj in folder.rglob("*.o"):
            obj.unlink()
        folder.mkdir(parents=True, exist_ok=True)
        stamp.write_text(command)


extra_compile_flags, extra_link_flags = flags_from_environment()

setup(
    ext_modules=[
        Extension(
            "fsdp_c._C",
            sources=c_sources(),
            include_dirs=["csrc"],
            define_macros=[("Py_LIMITED_API", "0x030A0000")],
            extra_compile_args=COMPILE_FLAGS + extra_compile_flags,
            extra_link_args=extra_link_flags + LINK_FLAGS,
            py_limited_api=True,
        )
    ],
    cmdclass={"build_ext": IncrementalBuild},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
