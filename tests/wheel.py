"""Requirements of a wheel's libraries, read from their ELF files: ``python -m tests.wheel dist/*.whl``.

The exit status is 1 if a library needs more than every machine of the wheel's platform tag provides.
"""

from __future__ import annotations

import io
import os
import struct
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from elftools.elf.elffile import ELFFile

NEWEST_GLIBC = (2, 28)  # limit of manylinux_2_28
SYSTEM = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libgcc_s.so.1"}
SYSTEM |= {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
NEEDED = {"_C": SYSTEM, "_cuda13": SYSTEM | {"libstdc++.so.6"}}
OF_OLD_GLIBC = {"libdl.so.2", "libpthread.so.0"}  # merged into libc.so.6 by newer versions
SHOWN = {"_C": {"PyInit__C"}, "_cuda13": {"fsdp_c_cuda_kernels"}}
ARCHS = os.environ.get("FSDP_C_CUDA_ARCHS", "75 80 86 89 90 100 120").split()  # of setup.py
CODE = {*(f"sm_{arch}" for arch in ARCHS), f"compute_{ARCHS[-1]}"}
FATBIN_HEADER, FATBIN_ENTRY = struct.Struct("<IHHQ"), struct.Struct("<HHIQIIHHI")
FATBIN_MAGIC = 0xBA55ED50
PTX, MACHINE_CODE = 1, 2


def libraries(wheel: Path) -> dict[str, ELFFile]:
    """Return the shared libraries of a wheel by name."""
    archive = zipfile.ZipFile(wheel)
    names = [name for name in archive.namelist() if ".so" in Path(name).suffixes]
    return {Path(name).name.partition(".")[0]: ELFFile(io.BytesIO(archive.read(name))) for name in names}


def needed(library: ELFFile) -> set[str]:
    """Return the libraries that the loader needs."""
    return {tag.needed for tag in library.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")}


def newest_glibc(library: ELFFile) -> tuple[int, ...]:
    """Return the newest version of the C library whose symbols are needed."""
    names = [
        version.name
        for _, versions in library.get_section_by_name(".gnu.version_r").iter_versions()
        for version in versions
    ]
    return max(tuple(map(int, name[6:].split("."))) for name in names if name.startswith("GLIBC_"))


def shown(library: ELFFile) -> set[str]:
    """Return the exported symbols."""
    symbols = library.get_section_by_name(".dynsym").iter_symbols()
    return {
        symbol.name
        for symbol in symbols
        if symbol["st_shndx"] != "SHN_UNDEF" and symbol["st_info"]["bind"] != "STB_LOCAL"
    }


def cuda_code(library: ELFFile) -> set[str]:
    """Return the GPU architectures of the code, in nvcc's notation."""
    section = library.get_section_by_name(".nv_fatbin")
    return set(fatbin_entries(section.data())) if section else set()


def fatbin_entries(data: bytes) -> Iterator[str]:
    at = 0
    while at + FATBIN_HEADER.size <= len(data):
        magic, _, header, size = FATBIN_HEADER.unpack_from(data, at)
        if magic != FATBIN_MAGIC:
            at += 8  # padding
            continue
        entry, at = at + header, at + header + size
        while entry < at:
            kind, _, header, size, *_, architecture = FATBIN_ENTRY.unpack_from(data, entry)
            yield f"{ {PTX: 'compute', MACHINE_CODE: 'sm'}[kind] }_{architecture}"
            entry += header + size


def faults(name: str, library: ELFFile) -> Iterator[str]:
    if more := needed(library) - NEEDED[name]:
        yield f"needs {', '.join(sorted(more))}"
    if lacking := OF_OLD_GLIBC - needed(library):
        yield f"does not ask for {', '.join(sorted(lacking))}"
    if (glibc := newest_glibc(library)) > NEWEST_GLIBC:
        yield f"needs a newer C library: {glibc}"
    if shown(library) != SHOWN[name]:
        yield f"shows {', '.join(sorted(shown(library)))}"
    if name != "_C" and cuda_code(library) != CODE:
        yield f"has code for {', '.join(sorted(cuda_code(library)))}"


def main(wheels: list[str]) -> int:
    found = []
    for wheel in map(Path, wheels):
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB")
        inside = libraries(wheel)
        found += [f"{wheel.name}: lacks {name}" for name in NEEDED.keys() - inside.keys()]
        for name, library in inside.items():
            glibc = ".".join(map(str, newest_glibc(library)))
            print(
                f"  {name}: {library.stream_len / 1e6:.2f} MB, glibc {glibc}, "
                f"{' '.join(sorted(needed(library)))}"
            )
            if code := cuda_code(library):
                print(f"    code for {' '.join(sorted(code))}")
            found += [f"{wheel.name}: {name} {fault}" for fault in faults(name, library)]
    for fault in found:
        print(fault)
    return 1 if found or not wheels else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
