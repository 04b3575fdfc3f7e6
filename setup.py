"""Builds fsdp_c._C: every C file under csrc/ in one abi3 extension module, with setuptools alone.

torch is not needed here: its symbols are found when the module is imported. Where nvcc stands, the CUDA
kernels become fsdp_c/_cuda13.so, of nvcc's major version, a library of its own that is loaded only with a
torch of that CUDA. `setup.py build_cuda` makes it alone.

Environment: FSDP_C_WERROR=1 makes warnings errors, FSDP_C_OPT="-O0 -g" replaces the optimisation flags,
FSDP_C_SANITIZE="address,undefined" instruments the module, FSDP_C_CHECK=1 has it check its invariants, as
instrumented ones do, FSDP_C_JOBS sets how many files compile at once.
FSDP_C_OLD_GLIBC=1 makes a module for C libraries older than this machine's, for wheels: see .ci/wheel.
FSDP_C_CUDA=0 leaves the CUDA kernels out and 1 demands them; otherwise they are built where nvcc is found and
fits the installed torch. FSDP_C_CUDA_ARCHS="90" replaces the architectures.
"""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from setuptools import Command, Extension, setup
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
OPTIMISATION = "-O3 -fno-plt"
# Functions whose signature is CPython's or torch's do not use every parameter.
STRICT_FLAGS = [
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",
    "-Wshadow",
    "-Wstrict-prototypes",
    "-Wmissing-prototypes",
    "-Werror",
]


def is_on(setting: str) -> bool:
    """Whether the environment has this setting, and not as "0"."""
    return os.environ.get(setting, "0") not in ("", "0")


def flags_from_environment() -> tuple[list[str], list[str]]:
    """Compile and link flags that the environment asks for."""
    compile_flags = shlex.split(os.environ.get("FSDP_C_OPT", OPTIMISATION))
    link_flags: list[str] = []
    if is_on("FSDP_C_WERROR"):
        compile_flags += STRICT_FLAGS
    if sanitizers := os.environ.get("FSDP_C_SANITIZE"):
        compile_flags += [f"-fsanitize={sanitizers}", "-fno-omit-frame-pointer", "-g"]
        link_flags += [f"-fsanitize={sanitizers}"]
    if sanitizers or is_on("FSDP_C_CHECK"):
        compile_flags += ["-DFSDP_C_CHECK"]
    if is_on("FSDP_C_OLD_GLIBC"):
        compile_flags += ["-include", "csrc/base/old_glibc.h"]
        link_flags += ["-Wl,--no-as-needed", "-l:libdl.so.2", "-l:libpthread.so.0", "-Wl,--as-needed"]
    return compile_flags, link_flags


def link_time_flags(compiler: list[str]) -> list[str]:
    """Those with which ``compiler`` optimises across files; none where it, or its linker, cannot.

    They save a twelfth of the host instructions that a unit adds to a step.
    """
    flags = ["-flto=auto"]
    if is_on("FSDP_C_OLD_GLIBC"):
        flags.append("-flto-partition=one")  # csrc/base/old_glibc.h is heeded in no other
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "probe.c").write_text("int probe(void) {\n    return 0;\n}\n")
        command = [*compiler, "-fPIC", "-shared", *flags, "probe.c", "-o", "probe.so"]
        with link_temporaries_in("."):
            can = subprocess.run(command, cwd=folder, capture_output=True).returncode == 0
    return flags if can else []


@contextmanager
def link_temporaries_in(folder: str) -> Iterator[None]:
    """gcc optimises across files by a makefile. Spaces and quotes in TMPDIR and the output's path break it."""
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = folder
    try:
        yield
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


def version() -> str:
    """The version that the package says it has."""
    (found,) = re.findall(r'^__version__ = "(.+)"', Path("fsdp_c/__init__.py").read_text(), re.MULTILINE)
    return found


def c_sources() -> list[str]:
    """The C files of the extension."""
    return sorted(path.as_posix() for path in Path("csrc").rglob("*.c"))


def headers_of(depfile: Path) -> list[str]:
    """The files an object was made from, as the compiler's -MMD wrote them down."""
    names = re.split(r"(?<!\\)\s+", depfile.read_text().replace("\\\n", " ").partition(": ")[2].strip())
    return [re.sub(r"\\([ #])", r"\1", name).replace("$$", "$") for name in names]


def is_stale(target: Path, inputs: list[str]) -> bool:
    """True if ``target`` is missing or older than any input, or an input has gone."""
    if not target.exists():
        return True
    built = target.stat().st_mtime_ns
    return any(not os.path.exists(name) or os.stat(name).st_mtime_ns > built for name in inputs)


def object_is_stale(source: str, obj: Path) -> bool:
    """True unless the object is newer than its source and every header that went into it."""
    depfile = obj.with_suffix(".d")
    return not depfile.exists() or is_stale(obj, [source, *headers_of(depfile)])


def forget_other_command(folder: Path, command: str) -> None:
    """Remove objects built by another command line: their times say nothing about it."""
    stamp = folder / "flags.json"
    if stamp.exists() and stamp.read_text() == command:
        return
    for obj in folder.rglob("*.o"):
        obj.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    stamp.write_text(command)


class IncrementalBuild(build_ext):
    """build_ext that compiles only what changed, headers and flags included, several files at once; then
    build_cuda."""

    def run(self) -> None:
        """Build the extension, and the CUDA kernels beside it."""
        super().run()
        cuda = self.get_finalized_command("build_cuda")
        cuda.folder = str(Path(self.get_ext_fullpath("fsdp_c._C")).parent)
        self.run_command("build_cuda")

    def build_extension(self, ext: Extension) -> None:
        """Compile the stale sources of ``ext`` and link them when anything is newer than the module."""
        if "FSDP_C_OPT" not in os.environ and "FSDP_C_SANITIZE" not in os.environ:
            flags = link_time_flags(self.compiler.compiler_so)
            ext.extra_compile_args, ext.extra_link_args = (
                ext.extra_compile_args + flags,
                flags + ext.extra_link_args,
            )
        target = Path(self.get_ext_fullpath(ext.name))
        folder = Path(self.build_temp)
        command = [self.compiler.compiler_so, ext.define_macros, ext.extra_compile_args, ext.extra_link_args]
        forget_other_command(folder, json.dumps(command))
        objects = {source: folder / Path(source).with_suffix(".o") for source in ext.sources}
        stale = [source for source, obj in objects.items() if self.force or object_is_stale(source, obj)]
        with ThreadPoolExecutor(int(os.environ.get("FSDP_C_JOBS", min(os.cpu_count() or 1, 8)))) as pool:
            list(pool.map(lambda source: self.compile_one(ext, source), stale))
        if stale or is_stale(target, [str(obj) for obj in objects.values()]):
            target.parent.mkdir(parents=True, exist_ok=True)
            made = Path("build", target.name)
            made.parent.mkdir(exist_ok=True)
            with link_temporaries_in("build"):
                self.compiler.link_shared_object(
                    [str(obj) for obj in objects.values()],
                    str(made),
                    extra_postargs=ext.extra_link_args,
                    build_temp=self.build_temp,
                    target_lang="c",
                )
            shutil.move(made, target)

    def compile_one(self, ext: Extension, source: str) -> None:
        """Compile one source; an error of the compiler ends the build."""
        self.compiler.compile(
            [source],
            output_dir=self.build_temp,
            macros=ext.define_macros,
            include_dirs=ext.include_dirs,
            extra_postargs=ext.extra_compile_args,
        )


# ---- the CUDA kernels

CUDA_FLAGS = [
    "-std=c++17",
    "-O3",
    "-fmad=false",
    "-Icsrc",
    "-Xcompiler=-fPIC,-fvisibility=hidden",
]  # [Note: exact arithmetic]
CUDA_STRICT_FLAGS = ["-Werror=all-warnings", "-Xcompiler=-Wall,-Wextra"]
CUDA_ARCHS = ("75", "80", "86", "89", "90", "100", "120")


def find_nvcc() -> str | None:
    """The CUDA compiler: on the path, under CUDA_HOME, or where its installer puts it."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    candidates = [shutil.which("nvcc"), *(f"{home}/bin/nvcc" for home in homes if home)]
    return next((path for path in candidates if path and os.access(path, os.X_OK)), None)


def ask_nvcc(nvcc: str, question: str, pattern: str) -> list[str]:
    """All that ``pattern`` finds in nvcc's answer."""
    return re.findall(
        pattern, subprocess.run([nvcc, question], capture_output=True, text=True, check=True).stdout
    )


def cuda_major(nvcc: str) -> str:
    """nvcc's major version, which torch's has to be."""
    (major,) = ask_nvcc(nvcc, "--version", r"release (\d+)\.")
    return major


def cuda_of_torch() -> str | None:
    """The CUDA version of the installed torch, "" for one without, None where there is no torch: read, not
    imported.

    pip builds where the packages of the environment cannot be imported, and installs among them.
    """
    found = importlib.util.find_spec("torch")
    folders = [*(found.submodule_search_locations or ())] if found else []
    folders += [f"{sysconfig.get_path(name)}/torch" for name in ("platlib", "purelib")]
    version = next((path for folder in folders if (path := Path(folder, "version.py")).exists()), None)
    if version is None:
        return None
    match = re.search(r"^cuda\b[^=]*=\s*'([\d.]+)'", version.read_text(), re.MULTILINE)
    return match[1] if match else ""


def why_no_cuda(nvcc: str | None, demanded: bool) -> str | None:
    """The reason not to build the CUDA kernels, or None."""
    if nvcc is None:
        return "nvcc is not found: put it on the path, or set CUDA_HOME"
    of_torch = cuda_of_torch()
    if of_torch == "" and not demanded:
        return "the installed torch computes on the CPU alone; FSDP_C_CUDA=1 builds them all the same"
    major = cuda_major(nvcc)
    if of_torch and of_torch.partition(".")[0] != major:
        return f"nvcc is of CUDA {major}, the installed torch of CUDA {of_torch}: their major versions must be the same"
    return None


def cuda_arch_flags(nvcc: str) -> list[str]:
    """Machine code for every architecture of the list that this nvcc knows, and PTX of the newest for those
    to come."""
    known = ask_nvcc(nvcc, "--list-gpu-code", r"sm_(\d+)\b")
    wanted = os.environ.get("FSDP_C_CUDA_ARCHS", "").split() or [arch for arch in CUDA_ARCHS if arch in known]
    flags = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in wanted]
    return [*flags, f"-gencode=arch=compute_{wanted[-1]},code=compute_{wanted[-1]}"]


def cuda_size_flags(nvcc: str) -> list[str]:
    """A quarter of the size, where every driver that the toolkit runs with can read it."""
    return ["--compress-mode=size"] if int(cuda_major(nvcc)) >= 13 else []


class BuildCuda(Command):
    """Compile csrc/kernels/*.cu into fsdp_c/_cuda13.so, or say why not."""

    description = "build the CUDA kernels"
    user_options = [
        ("folder=", None, "where to put the library"),
        ("build-temp=", "t", "where to put the objects"),
    ]

    def initialize_options(self) -> None:
        """Set the defaults: in place."""
        self.folder = "fsdp_c"
        self.build_temp = "build/cuda"

    def finalize_options(self) -> None:
        """Nothing depends on another option."""

    def run(self) -> None:
        """Build what is stale. RuntimeError where FSDP_C_CUDA=1 demands what cannot be built."""
        setting = os.environ.get("FSDP_C_CUDA", "")
        nvcc = find_nvcc()
        reason = "FSDP_C_CUDA=0" if setting == "0" else why_no_cuda(nvcc, setting == "1")
        if reason is None and nvcc is not None:
            self.build(nvcc)
            return
        if setting == "1":
            raise RuntimeError(f"fsdp_c: the CUDA kernels cannot be built: {reason}")
        print(f"fsdp_c: built for the CPU, without CUDA kernels ({reason})")

    def build(self, nvcc: str) -> None:
        """Compile the stale sources, several at once, and link."""
        strict = is_on("FSDP_C_WERROR")
        warnings = CUDA_STRICT_FLAGS if strict else []
        command = [nvcc, *CUDA_FLAGS, *warnings, *cuda_size_flags(nvcc), *cuda_arch_flags(nvcc)]
        folder = Path(self.build_temp)
        forget_other_command(folder, json.dumps(command))
        objects = {
            source: folder / (source.stem + ".o") for source in sorted(Path("csrc/kernels").glob("*.cu"))
        }
        stale = [source for source, obj in objects.items() if object_is_stale(str(source), obj)]
        with ThreadPoolExecutor(int(os.environ.get("FSDP_C_JOBS", min(os.cpu_count() or 1, 8)))) as pool:
            list(pool.map(lambda source: self.compile_one(command, source, objects[source]), stale))
        target = Path(self.folder) / f"_cuda{cuda_major(nvcc)}.so"
        if stale or is_stale(target, [str(obj) for obj in objects.values()]):
            target.parent.mkdir(parents=True, exist_ok=True)
            pip_has_it_here = f"-L{Path(nvcc).parents[1] / 'lib'}"
            linking = [nvcc, "-shared", "-cudart=static", pip_has_it_here, "-Xlinker=--exclude-libs,ALL,-s"]
            linking += map(str, objects.values())
            if is_on("FSDP_C_OLD_GLIBC"):
                linking.append("-Xlinker=--no-as-needed,-l:libdl.so.2,-l:libpthread.so.0,-l:librt.so.1")
            subprocess.run([*linking, "-o", str(target)], check=True)

    def compile_one(self, command: list[str], source: Path, obj: Path) -> None:
        """Compile one source; its headers are written beside the object."""
        depfile = obj.with_suffix(".d")
        subprocess.run([*command, "-MMD", "-MF", str(depfile), "-c", str(source), "-o", str(obj)], check=True)


extra_compile_flags, extra_link_flags = flags_from_environment()

setup(
    version=version(),
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
    cmdclass={"build_ext": IncrementalBuild, "build_cuda": BuildCuda},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
