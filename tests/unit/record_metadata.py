"""Prints, in base64, the ``.metadata`` that this Python's pickle makes of one checkpoint. Needs no torch.

    python record_metadata.py [--torch] [--values N] [--protocol N]

With ``--torch`` the classes are those of the torch that is installed, else stand-ins of the same names and
attributes. ``--values``: how many ``TensorProperties`` has, 5 until torch 2.14 and 6 since. What was printed
is recorded in recorded_metadata.json.
"""

import argparse
import base64
import copyreg
import enum
import pathlib
import pickle
import sys
import types

METADATA = "torch.distributed.checkpoint.metadata"
FILESYSTEM = "torch.distributed.checkpoint.filesystem"


def stand_ins(count: int) -> None:
    for name in ("torch", "torch.serialization", METADATA, FILESYSTEM):
        sys.modules[name] = types.ModuleType(name)
    torch, metadata = sys.modules["torch"], sys.modules[METADATA]

    def put(module: types.ModuleType, name: str, made: type) -> type:
        made.__module__, made.__qualname__ = module.__name__, name
        setattr(module, name, made)
        return made

    def plain(module: types.ModuleType, name: str, *fields: str) -> type:
        def init(self: object, *values: object) -> None:
            self.__dict__.update(zip(fields, values, strict=False))

        return put(module, name, type(name, (), {"__init__": init}))

    size = put(torch, "Size", type("Size", (tuple,), {}))
    size.__reduce__ = lambda self: (size, (tuple(self),))  # type: ignore[method-assign,assignment]
    dtype = put(torch, "dtype", type("dtype", (), {"__reduce__": lambda self: "float32"}))
    dtype.__module__ = "torch"
    torch.float32 = dtype()
    torch.float32.__module__ = "torch"
    layout = put(torch, "layout", type("layout", (), {"__str__": lambda self: "torch.strided"}))
    torch.strided = layout()

    def _get_layout(name: str) -> object:
        return torch.strided

    _get_layout.__module__, _get_layout.__qualname__ = "torch.serialization", "_get_layout"
    sys.modules["torch.serialization"]._get_layout = _get_layout
    copyreg.pickle(layout, lambda value: (_get_layout, (str(value),)))
    members = {"TORCH_CONTIGUOUS_FORMAT": 0, "TORCH_CHANNELS_LAST": 1, "TORCH_PRESERVE_FORMAT": 2}
    formats = enum.Enum("_MEM_FORMAT_ENCODING", members, module=METADATA)
    metadata._MEM_FORMAT_ENCODING = formats

    properties = plain(metadata, "TensorProperties", "dtype")

    def getstate(self: object) -> tuple:
        state = (torch.float32, torch.strided, False, formats.TORCH_CONTIGUOUS_FORMAT, False)
        return (*state, (3, 1))[:count]

    properties.__getstate__ = getstate
    plain(metadata, "ChunkStorageMetadata", "offsets", "sizes")
    plain(metadata, "TensorStorageMetadata", "properties", "size", "chunks")
    plain(metadata, "BytesStorageMetadata")
    plain(metadata, "MetadataIndex", "fqn", "offset", "index")
    plain(metadata, "StorageMeta", "checkpoint_id", "save_id", "load_id", "modules")
    plain(
        metadata, "Metadata", "state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"
    )
    plain(sys.modules[FILESYSTEM], "_StorageInfo", "relative_path", "offset", "length")


def made() -> object:
    metadata, torch = sys.modules[METADATA], sys.modules["torch"]
    chunk = metadata.ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((2, 3)))
    weight = metadata.TensorStorageMetadata(
        metadata.TensorProperties(torch.float32), torch.Size((2, 3)), [chunk]
    )
    info = sys.modules[FILESYSTEM]._StorageInfo
    return metadata.Metadata(
        {"model.weight": weight, "note": metadata.BytesStorageMetadata()},
        {"model.weight": ("model", "weight"), "note": ("note",)},
        {
            metadata.MetadataIndex("model.weight", torch.Size((0, 0)), 0): info("__0_0.distcp", 0, 1200),
            metadata.MetadataIndex("note", None, None): info("__0_0.distcp", 1200, 800),
        },
        metadata.StorageMeta(pathlib.Path("saved"), "one", None, []),
        "1.0.0",
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--values", type=int, default=5)
    parser.add_argument("--protocol", type=int, default=pickle.DEFAULT_PROTOCOL)
    args = parser.parse_args()
    if args.torch:
        import torch
        import torch.distributed.checkpoint.filesystem  # noqa: F401
    else:
        stand_ins(args.values)
    print(base64.b64encode(pickle.dumps(made(), args.protocol)).decode())


if __name__ == "__main__":
    main()
