"""Build fsdp_c._C, one abi3 extension module of all C files under csrc/, with setuptools only.

The build does not need torch: the module resolves torch's symbols at import. With nvcc, the CUDA kernels
become a separate library, fsdp_c/_cuda13.so for nvcc 13, which is loaded only with a torch of that CUDA
version. `setup.py build_cuda` builds only this library.

Environment variables:
FSDP_C_WERROR=1      make warnings errors
FSDP_C_OPT           replace the optimisation flags, e.g. "-O0 -g"
FSDP_C_SANITIZE      instrument the module, e.g. "address,undefined"; implies FSDP_C_CHECK
FSDP_C_CHECK=1       check invariants at run time
FSDP_C_JOBS          number of parallel compilers
FSDP_C_OLD_GLIBC=1   build for older C libraries than this machine's: see .ci/wheel
FSDP_C_CUDA          0 skips the CUDA kernels, 1 demands them; by default nvcc must exist and fit torch
FSDP_C_CUDA_ARCHS    replace the GPU architectures, e.g. "90"
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

# [Note: exact arithmetic] Results must equal torch's bit for bit, so no product and sum may be fused.
# No code reads the processor's floating-point exceptions: selects of floats may be vectorised.
COMPILE_FLAGS = [
    "-std=c11",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fexceptions",
    "-fvisibility=hidden",
    "-pthread",
    "-MMD",
]
LINK_FLAGS = ["-pthread", "-ldl", "-lm"]
OPTIMISATION = "-O3 -fno-plt"
# Unused parameters are allowed: CPython and torch prescribe signatures.
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
    """Return True if the environment variable is set, to anything but "0"."""
    return os.environ.get(setting, "0") not in ("", "0")


def flags_from_environment() -> tuple[list[str], list[str]]:
    """Return the compile and link flags that the environment variables select."""
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
    """Return flags for link-time optimisation, empty if the compiler or its linker does not support it.

    The optimisation saves a twelfth of the host instructions per unit and step.
    """
    flags = ["-flto=auto"]
    if is_on("FSDP_C_OLD_GLIBC"):
        flags.append("-flto-partition=one")  # other partitionings ignore csrc/base/old_glibc.h
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "probe.c").write_text("int probe(void) {\n    return 0;\n}\n")
        command = [*compiler, "-fPIC", "-shared", *flags, "probe.c", "-o", "probe.so"]
        with link_temporaries_in("."):
            can = subprocess.run(command, cwd=folder, capture_output=True).returncode == 0
    return flags if can else []


@contextmanager
def link_temporaries_in(folder: str) -> Iterator[None]:
    """Set TMPDIR in the body: gcc's link-time optimisation writes a makefile there, and spaces or quotes in
    TMPDIR or the output's path break it.
    """
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
    """Return the package's ``__version__``."""
    (found,) = re.findall(r'^__version__ = "(.+)"', Path("fsdp_c/__init__.py").read_text(), re.MULTILINE)
    return found


def c_sources() -> list[str]:
    """Return the C files of the extension."""
    return sorted(path.as_posix() for path in Path("csrc").rglob("*.c"))


def headers_of(depfile: Path) -> list[str]:
    """Return the files that an object depends on, from the compiler's -MMD output."""
    names = re.split(r"(?<!\\)\s+", depfile.read_text().replace("\\\n", " ").partition(": ")[2].strip())
    return [re.sub(r"\\([ #])", r"\1", name).replace("$$", "$") for name in names]


def is_stale(target: Path, inputs: list[str]) -> bool:
    """Return True if ``target`` is missing or older than an input, or an input is missing."""
    if not target.exists():
        return True
    built = target.stat().st_mtime_ns
    return any(not os.path.exists(name) or os.stat(name).st_mtime_ns > built for name in inputs)


def object_is_stale(source: str, obj: Path) -> bool:
    """Return True unless the object is newer than its source and all its headers."""
    depfile = obj.with_suffix(".d")
    return not depfile.exists() or is_stale(obj, [source, *headers_of(depfile)])


def forget_other_command(folder: Path, command: str) -> None:
    """Remove objects built by a different command line, which their timestamps do not show."""
    stamp = folder / "flags.json"
    if stamp.exists() and stamp.read_text() == command:
        return
    for obj in folder.rglob("*.o"):
        obj.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    stamp.write_text(command)


class IncrementalBuild(build_ext):
    """build_ext that compiles only stale files, in parallel, and then runs build_cuda."""

    def run(self) -> None:
        """Build the extension, and the CUDA kernels into the same folder."""
        super().run()
        cuda = self.get_finalized_command("build_cuda")
        cuda.folder = str(Path(self.get_ext_fullpath("fsdp_c._C")).parent)
        self.run_command("build_cuda")

    def build_extension(self, ext: Extension) -> None:
        """Compile the stale sources of ``ext``, and link if an object is newer than the module."""
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
        """Compile one source. A compiler error ends the build."""
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
    """Return the CUDA compiler from PATH, CUDA_HOME, CUDA_PATH or the installer's default folder."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    candidates = [shutil.which("nvcc"), *(f"{home}/bin/nvcc" for home in homes if home)]
    return next((path for path in candidates if path and os.access(path, os.X_OK)), None)


def ask_nvcc(nvcc: str, question: str, pattern: str) -> list[str]:
    """Return all matches of ``pattern`` in nvcc's output for the option."""
    return re.findall(
        pattern, subprocess.run([nvcc, question], capture_output=True, text=True, check=True).stdout
    )


def cuda_major(nvcc: str) -> str:
    """Return nvcc's major version, which must equal that of torch's CUDA."""
    (major,) = ask_nvcc(nvcc, "--version", r"release (\d+)\.")
    return major


def cuda_of_torch() -> str | None:
    """Return the CUDA version of the installed torch, "" for a CPU build, None without torch.

    The version is read from a file: under pip's build isolation torch cannot be imported.
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
    """Return the reason not to build the CUDA kernels, or None."""
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
    """Return flags for machine code of each architecture that nvcc supports, and PTX of the newest for later
    GPUs."""
    known = ask_nvcc(nvcc, "--list-gpu-code", r"sm_(\d+)\b")
    wanted = os.environ.get("FSDP_C_CUDA_ARCHS", "").split() or [arch for arch in CUDA_ARCHS if arch in known]
    flags = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in wanted]
    return [*flags, f"-gencode=arch=compute_{wanted[-1]},code=compute_{wanted[-1]}"]


def cuda_size_flags(nvcc: str) -> list[str]:
    """Return flags that compress the code to a quarter, if every driver of this toolkit can read it."""
    return ["--compress-mode=size"] if int(cuda_major(nvcc)) >= 13 else []


class BuildCuda(Command):
    """Compile csrc/kernels/*.cu into fsdp_c/_cuda13.so, or print the reason why not."""

    description = "build the CUDA kernels"
    user_options = [
        ("folder=", None, "where to put the library"),
        ("build-temp=", "t", "where to put the objects"),
    ]

    def initialize_options(self) -> None:
        """Set the defaults, which build in place."""
        self.folder = "fsdp_c"
        self.build_temp = "build/cuda"

    def finalize_options(self) -> None:
        """Do nothing: no option depends on another."""

    def run(self) -> None:
        """Build stale files. Raises RuntimeError if FSDP_C_CUDA=1 and the kernels cannot be built."""
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
        """Compile the stale sources in parallel, and link."""
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
        """Compile one source, and write its dependencies beside the object."""
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
