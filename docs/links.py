"""Links names in code, such as `kpt.SFTTask`, to their pages."""

import functools

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms import SphinxTransform

from docs import examples


@functools.cache
def targets():
    """`{name as written: full name}`, also for members of classes."""
    found, last = {}, {}
    for name, value in examples.public_names().items():
        members = {}
        if isinstance(value, type):
            for owner, cls in examples.public_names().items():
                if isinstance(cls, type) and issubclass(value, cls):
                    members |= {
                        f"{name}.{m}": f"{owner}.{m}"
                        for m in examples.own_members(cls)
                        if f"{name}.{m}" not in members or owner == name
                    }
        for written, full in {name: name, **members}.items():
            found[written] = full
            found[written.replace("keras_posttrain", "kpt", 1)] = full
        own = name.rpartition(".")[2]
        last.setdefault(own, []).append(name)
    # A class or function may be named alone, where there is only one.
    for own, names in last.items():
        is_clear = "_" in own or own[0].isupper() and not own.isupper()
        if len(names) == 1 and is_clear:
            found.setdefault(own, names[0])
            value = examples.public_names()[names[0]]
            is_class = isinstance(value, type)
            for member in examples.own_members(value) if is_class else ():
                found.setdefault(f"{own}.{member}", f"{names[0]}.{member}")
    return found


class LinkNames(SphinxTransform):
    """Makes a reference of each literal that is a public name."""

    default_priority = 5

    def apply(self, **kwargs):
        for node in list(self.document.findall(nodes.literal)):
            text = node.astext().removesuffix("()")
            full = targets().get(text.partition("(")[0])
            within = node.parent
            while within is not None and not isinstance(
                within, (nodes.reference, addnodes.pending_xref, nodes.title)
            ):
                within = within.parent
            if full is None or within is not None:
                continue
            reference = addnodes.pending_xref(
                "",
                refdomain="py",
                reftype="obj",
                reftarget=full,
                refexplicit=True,
                refdoc=self.env.docname,
            )
            node.replace_self(reference)
            reference += node
