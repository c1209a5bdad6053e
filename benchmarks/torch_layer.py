"""The layer of benchmarks.moe_layer in torch, on torch._grouped_mm and its gradients.

Tokens are sorted as there, so that gradients of gathers are gathers. A pass is one CUDA graph;
its elementwise operations are torch's own, in bfloat16, and not fused.
"""

from __future__ import annotations

import functools
import types

import jax
import jax.numpy as jnp

from benchmarks import forms


@functools.cache
def functions():
    """The passes "forward" and "step" of (router, gate_up, down), tokens, target, top_k."""
    torch = forms.import_peer("torch")

    class Dispatch(torch.autograd.Function):
        """Rows by expert, of tokens; each goes to top_k experts."""

        @staticmethod
        def forward(ctx, tokens, order, inverse, top_k):
            ctx.save_for_backward(inverse)
            ctx.top_k = top_k
            return tokens[order // top_k]

        @staticmethod
        def backward(ctx, rows):
            (inverse,) = ctx.saved_tensors
            by_token = rows[inverse].view(-1, ctx.top_k, rows.shape[1])
            return by_token.sum(1), None, None, None

    class Undo(torch.autograd.Function):
        """Rows by token and expert, of rows by expert."""

        @staticmethod
        def forward(ctx, rows, order, inverse):
            ctx.save_for_backward(order)
            return rows[inverse]

        @staticmethod
        def backward(ctx, rows):
            (order,) = ctx.saved_tensors
            return rows[order], None, None

    def forward(layer, tokens, target, top_k):
        router, gate_up, down = layer
        e, d, two, f = gate_up.shape
        scores = torch.softmax(tokens.float() @ router, -1)
        weights, experts = scores.topk(top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        experts, order = experts.flatten().sort(stable=True)
        inverse = order.argsort()
        ends = torch.searchsorted(
            experts, torch.arange(1, e + 1, device=experts.device), out_int32=True
        )
        rows = Dispatch.apply(tokens, order, inverse, top_k)
        gate, up = torch._grouped_mm(rows, gate_up.view(e, d, two * f), offs=ends).chunk(2, -1)
        hidden = torch.nn.functional.silu(gate) * up
        rows = Undo.apply(torch._grouped_mm(hidden, down, offs=ends), order, inverse)
        by_token = rows.view(-1, top_k, d).float() * weights[..., None]
        return by_token.sum(1).to(tokens.dtype)

    def step(layer, tokens, target, top_k):
        layer = [x.detach().requires_grad_() for x in layer]
        tokens = tokens.detach().requires_grad_()
        out = forward(layer, tokens, target, top_k)
        loss = (out.float() * target.float()).sum()
        return loss.detach(), *torch.autograd.grad(loss, [*layer, tokens])

    return types.SimpleNamespace(forward=forward, step=step)


def to_jax(name, out, layer):
    """What the pass gives, as benchmarks.moe_layer's: layer has the structure of the weights."""
    if name == "forward":
        return jnp.from_dlpack(out)
    loss, *gradients, tokens = map(jnp.from_dlpack, out)
    return loss, (jax.tree.unflatten(jax.tree.structure(layer), gradients), tokens)


def compile_pass(name, operands, top_k):
    """A burst of "forward" or "step", its result, and the bytes that it needs at once."""
    torch = forms.import_peer("torch")
    if not torch.cuda.is_available():
        raise forms.Absent("torch sees no GPU")
    given = jax.tree.leaves(jax.block_until_ready(operands))
    *layer, tokens, target = map(torch.from_dlpack, given)
    run = functools.partial(getattr(functions(), name), layer, tokens, target, top_k)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = run()
    peak = torch.cuda.max_memory_allocated() - before
    del out
    burst, out = forms.torch_burst(torch, [run])

    def result():
        burst.wait(burst.start(1))
        return to_jax(name, out, operands[0])

    return burst, result, peak + sum(x.nbytes for x in given)
