"""Communication overlapped with computation or other communication: distributed.overlap.

Loaded only if that is set.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from kempner.config.option import ConfigError
from kempner.model.decoder import Decoder
from kempner.parallel.layout import Layout

_aten: Any = torch.ops.aten
FSDP_SWITCHES = {  # of FSDP2 in torch 2.13 and later
    "reduce": "set_separate_reduce_scatter_group",
    "symm_mem": "set_symm_mem_for_comm",
}


def choose_messages(model: Decoder, layout: Layout, overlap: Sequence[str]) -> None:
    """Let FSDP reduce over a separate communicator, beside its gathers, or send from symmetric
    memory. Raises ConfigError if this torch or device cannot."""
    device = layout.mesh.device_type
    for name in FSDP_SWITCHES.keys() & {*overlap}:
        if hasattr(FSDPModule, FSDP_SWITCHES[name]) and (name == "reduce" or device == "cuda"):
            continue
        raise ConfigError(
            f"distributed.overlap: torch {torch.__version__} has no {name} on a {device} device; "
            f"leave {name} out"
        )
    modules: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if "reduce" in overlap:
        modules[0].set_separate_reduce_scatter_group()  # of all modules, in one call
        states = [module._get_fsdp_state() for module in modules]
        # In the layout, so that the watchdog sets their timeout, too.
        parts = [part for state in states for part in state._fsdp_param_groups]
        layout.added_groups.extend({part._reduce_scatter_process_group for part in parts})
    for module in modules if "symm_mem" in overlap else ():
        module.set_symm_mem_for_comm()


# --- Tensor parallelism: collectives behind products ---


def overlap_collectives(mesh: DeviceMesh) -> None:
    """Let the compiler run each gather and scatter of a block in pieces, overlapped with the
    product that consumes or makes them, over symmetric memory. Call it before compiling. Raises
    ConfigError if this torch cannot.

    In the forward pass each has its product. In the backward pass the gradients of a norm's several
    products are summed before they are scattered: sum_in_one_product() makes them one product.
    """
    import torch._inductor.config as inductor
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
    from torch.distributed import _symmetric_memory as symmetric

    class OneProduct(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            sum_in_one_product(graph)

        def uuid(self) -> bytes:  # identifies the pass in the compiler's cache
            return get_hash_for_files((__file__,))

    if not hasattr(inductor, "_micro_pipeline_tp") or (
        mesh.device_type != "cuda" and not getattr(symmetric, "_is_test_mode", False)
    ):
        raise ConfigError(
            f"distributed.overlap: torch {torch.__version__} cannot hide messages of tp on a "
            f"{mesh.device_type} device; leave tp out"
        )
    inductor._micro_pipeline_tp = True
    inductor.post_grad_custom_pre_pass = OneProduct()
    if hasattr(symmetric, "enable_symm_mem_for_group"):
        with warnings.catch_warnings():
            # torch 2.13 calls this unnecessary, but its pass still checks for it.
            warnings.simplefilter("ignore", FutureWarning)
            symmetric.enable_symm_mem_for_group(mesh.get_group().group_name)


def sum_in_one_product(graph: torch.fx.Graph) -> None:
    """Replace A1 @ B1 + A2 @ B2 + ..., which is scattered, by [A1 A2 ...] @ [B1; B2; ...]: a
    product that can be scattered piece by piece. `graph`: of torch.compile's post-grad passes. Sums
    whose sizes change between steps stay."""
    for total in list(graph.nodes):
        products = _summands(total)
        if len(products) < 2 or not _is_scattered(total):
            continue
        shape = _shape(total)  # [B, T, D]
        if not all(isinstance(size, int) for size in shape):
            continue
        with graph.inserting_before(total):

            def add(target: Any, *args: Any) -> torch.fx.Node:
                node = graph.call_function(target, args)
                values = torch.fx.node.map_arg(args, lambda x: x.meta["val"])
                # Values are fake tensors: later passes read their shapes.
                node.meta["val"] = target(*values)
                return node

            apart = [(a, [*shape[:-1], _shape(a)[1]]) for a, _ in products]
            parts = [add(_aten.reshape.default, *each) for each in apart]
            rows = add(_aten.cat.default, parts, len(shape) - 1)
            flat = add(_aten.reshape.default, rows, [-1, _shape(rows)[-1]])
            columns = add(_aten.cat.default, [b for _, b in products], 0)
            product = add(_aten.mm.default, flat, columns)
            total.replace_all_uses_with(add(_aten.reshape.default, product, list(shape)))
    _join_views(graph)
    graph.eliminate_dead_code()


def _join_views(graph: torch.fx.Graph) -> None:
    """Remove the views between a gathered or scattered tensor and the matrix of a product if they
    end in their initial shape: those of a single row."""
    collectives = torch.ops._c10d_functional
    views = (_aten.reshape.default, _aten.unsqueeze.default, _aten.squeeze.dim)
    for node in list(graph.nodes):
        source = node
        while source.target in views:
            source = source.args[0]
        gathered = source.target is collectives.wait_tensor.default
        scattered = any(u.target is collectives.reduce_scatter_tensor.default for u in node.users)
        if source is not node and (gathered or scattered) and _shape(source) == _shape(node):
            node.replace_all_uses_with(source)


def _shape(node: torch.fx.Node) -> torch.Size:
    return cast(torch.Size, node.meta["val"].shape)


def _summands(node: Any) -> list[tuple[Any, Any]]:
    """Return both sides of each product that a node sums; none if it is any other sum."""
    if node.target is _aten.reshape.default and node.args[0].target is _aten.mm.default:
        product = node.args[0]
        return [product.args] if len(product.users) == 1 else []
    # A keyword is alpha, which scales one side: not a plain sum of products.
    if node.target is not _aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return []
    found = []
    for each in node.args:
        # A product with other users must be computed anyway: nothing would be saved.
        if not isinstance(each, torch.fx.Node) or len(each.users) > 1:
            return []
        if not (products := _summands(each)):
            return []
        found += products
    return found


def _is_scattered(node: torch.fx.Node) -> bool:
    """Return whether a node's only use is its reduce-scatter, of parts that are
    split and concatenated."""
    cuts = (_aten.slice.Tensor, _aten.split.Tensor, operator.getitem)
    ways = (*cuts, _aten.cat.default, _aten.reshape.default, _aten.squeeze.dim)
    scatter = torch.ops._c10d_functional.reduce_scatter_tensor.default
    return bool(node.users) and all(
        user.target is scatter or (user.target in ways and _is_scattered(user))
        for user in node.users
    )
