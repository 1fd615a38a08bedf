"""The folder of one step of a checkpoint, written and read at once."""

import shutil

import jax

from keras_posttrain.callbacks.directories import advice


def write(path, arrays, meta):
    """Writes a folder with `state` and `meta`, in place of one that is there.

    It is complete when this returns: it is written beside and renamed.
    """
    # Imported late, as only runs with checkpoints need it.
    import orbax.checkpoint as ocp

    path = path.absolute()
    try:
        with _checkpointer() as checkpointer:
            checkpointer.save(
                path,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(arrays | {"best": {}}),
                    meta=ocp.args.JsonSave(meta | {"best": []}),
                ),
                force=True,
            )
    except OSError as e:
        shutil.rmtree(path, ignore_errors=True)
        raise OSError(
            f"A state could not be written to {str(path)!r}. "
            f"{advice(e, path)}. ({type(e).__name__}: {str(e)[:500]})"
        ) from e


def read_meta(path):
    """Returns the `meta` of a folder.

    Raises:
        ValueError: there is none that can be read.
    """
    # Imported late, as only runs with checkpoints need it.
    import orbax.checkpoint as ocp

    return _read(
        path, ocp.JsonCheckpointHandler(), "meta", ocp.args.JsonRestore()
    )


def read_arrays(path, arrays, meta):
    """Returns the arrays of a folder, as `arrays` are placed."""
    # Imported late, as only runs with checkpoints need it.
    import orbax.checkpoint as ocp

    best = {name: arrays["trainable"] for name in meta["best"]}
    wanted = jax.tree.map(abstract, {**arrays, "best": best})
    return _read(
        path,
        ocp.StandardCheckpointHandler(),
        "state",
        ocp.args.StandardRestore(wanted),
    )


def _read(path, handler, name, args):
    try:
        return handler.restore(path.absolute() / name, args=args)
    except Exception as e:  # noqa: BLE001 - damage can raise any error
        raise ValueError(
            f"No state can be read from {str(path)!r}: name a folder that "
            "`save_state` wrote, or that of a step of "
            '`kpt.callbacks.Checkpoint`, such as "run/checkpoints/500". '
            f"({type(e).__name__}: {str(e)[:300]})"
        ) from e


def _checkpointer():
    # Imported late, as only runs with checkpoints need it.
    import orbax.checkpoint as ocp

    return ocp.Checkpointer(ocp.CompositeCheckpointHandler())


def abstract(array):
    """Returns the shape, dtype and sharding of an array."""
    return jax.ShapeDtypeStruct(
        array.shape, array.dtype, sharding=array.sharding
    )
