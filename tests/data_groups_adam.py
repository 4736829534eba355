"""What ranks do in test_quantized_adam.py; they import these functions by name."""

import torch
import torch.distributed as dist
from data_groups import Net, backward, batch, clear, counting, optimizer_of, parameters, probe, through_a_file

from thinpipe.harness import tcp
from thinpipe.harness.quantized_adam import QuantizedAdam


def step(module, optimizer, index, rank, *, warming_up):
    """One step on this group's batch."""
    backward(module, *batch(index, rank))
    optimizer.set_warmup(warming_up)
    optimizer.average_gradients()
    optimizer.step()
    optimizer.zero_grad()


def flat(optimizer, key):
    return torch.cat([optimizer.state[slot.parameter][key].view(-1) for slot in optimizer._slots]).clone()


def trained(group, bits, warm, steps, width=37):
    """Parameters and momenta after `warm` steps of warm-up and after all steps."""
    rank = dist.get_rank(group)
    module = Net(norm=False, width=width)
    optimizer = optimizer_of(module, QuantizedAdam, group=group, bits=bits)
    found = []
    for index in range(steps):
        step(module, optimizer, index, rank, warming_up=index < warm)
        if index + 1 in (warm, steps):
            found.append((parameters(module), flat(optimizer, "exp_avg")))
    return found


def compared(group, steps):
    """Parameters after steps of warm-up, and of torch's AdamW on gradients averaged by hand."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    module, plain = Net(norm=False), Net(norm=False)
    optimizer = optimizer_of(module, QuantizedAdam, group=group, bits=4)
    reference = optimizer_of(plain, fused=True)
    for index in range(steps):
        step(module, optimizer, index, rank, warming_up=True)
        backward(plain, *batch(index, rank))
        for parameter in plain.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(size)
                dist.all_reduce(parameter.grad, group=group)
        reference.step()
        reference.zero_grad()
    return parameters(module), parameters(plain)


def one_exchange(group, bits):
    """Momentum and both errors before a step, this group's gradient, and what the step made of them; twice."""
    rank = dist.get_rank(group)
    module = Net(norm=False)
    optimizer = optimizer_of(module, QuantizedAdam, group=group, bits=bits)
    for index in range(2):
        step(module, optimizer, index, rank, warming_up=True)
    optimizer.set_warmup(False)
    found = []
    for index in range(2, 4):
        backward(module, *batch(index, rank))
        gradient = torch.cat(
            [(torch.zeros_like(s.parameter) if s.parameter.grad is None else s.parameter.grad).view(-1)
             for s in optimizer._slots]
        )  # fmt: skip
        before = [t.clone() for t in (optimizer._momentum, optimizer._error, optimizer._owner_error)]
        optimizer.step()
        clear(module)
        after = [t.clone() for t in (optimizer._momentum, optimizer._error, optimizer._owner_error)]
        found.append((gradient.clone(), before, after))
    return found


def kept(group, bits, steps):
    """The sums of exchanged momenta and of the momenta before their exchange, and both errors at the end."""
    rank = dist.get_rank(group)
    module = Net(norm=False)
    optimizer = optimizer_of(module, QuantizedAdam, group=group, bits=bits)
    step(module, optimizer, 0, rank, warming_up=True)
    exchanged = own = 0.0
    for index in range(1, steps):
        previous = flat(optimizer, "exp_avg").double()
        backward(module, *batch(index, rank))
        optimizer.set_warmup(False)
        optimizer._advance()
        own = own + flat(optimizer, "exp_avg").double()
        # What _advance did is undone: step does it again.
        for slot in optimizer._slots:
            state = optimizer.state[slot.parameter]
            state["exp_avg"].copy_(previous[slot.start : slot.stop].view(slot.parameter.shape))
            if slot.parameter.grad is not None:
                state["step"] -= 1
        optimizer.step()
        clear(module)
        exchanged = exchanged + flat(optimizer, "exp_avg").double()
    return own, exchanged, optimizer._error.clone(), optimizer._owner_error.clone()


def quadratic(group, bits, steps):
    """Distance from the optimum of a noisy quadratic: with QuantizedAdam, without its rounding, and with AdamW."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    curvature = torch.logspace(-1, 1, 1500)
    target = torch.randn(1500, generator=torch.Generator().manual_seed(1))
    noise = torch.Generator().manual_seed(100 + rank)
    here, exact, there = (torch.zeros(1500, requires_grad=True) for _ in range(3))
    warm = steps // 10
    quantised = QuantizedAdam([here], lr=0.02, weight_decay=0.0, group=group, bits=bits)
    plain = torch.optim.AdamW([there], lr=0.02, weight_decay=0.0, fused=True)
    first, second = torch.zeros(1500), torch.zeros(1500)
    for index in range(steps):
        drawn = 0.3 * torch.randn(1500, generator=noise)
        lr = 0.02 * (1 - index / steps)
        for x in (here, exact, there):
            x.grad = curvature * (x.detach() - target) + drawn
        for x in (exact, there):
            x.grad /= size
            dist.all_reduce(x.grad, group=group)
        for optimizer in (quantised, plain):
            optimizer.param_groups[0]["lr"] = lr
        quantised.set_warmup(index < warm)
        quantised.average_gradients()
        quantised.step()
        plain.step()
        first.lerp_(exact.grad, 0.1)
        if index < warm:
            second.mul_(0.999).add_(exact.grad**2, alpha=0.001)
        scale = (second / (1 - 0.999 ** min(index + 1, warm))).sqrt() + 1e-8
        with torch.no_grad():
            exact -= lr / (1 - 0.9 ** (index + 1)) * first / scale
    return [float((x.detach() - target).norm() / target.norm()) for x in (here, exact, there)]


def counted(group, bits, width):
    """By step (two of warm-up, two after): TCP's bytes on the data group's connections, and the formula's."""
    rank = dist.get_rank(group)
    own = set(tcp.connections())
    control = dist.new_group(backend="gloo")
    added = probe(group, own, control)
    module = Net(norm=False, width=width)
    optimizer = optimizer_of(module, QuantizedAdam, group=group, bits=bits)
    found = []
    for index in range(4):
        optimizer.set_warmup(index < 2)
        expected = optimizer.traffic().on_the_wire(added)
        with counting(own, control) as sent:
            step(module, optimizer, index, rank, warming_up=index < 2)
        found.append((sum(sent), expected))
    return found, optimizer.num_elements


def resumed(group, saved_at):
    """Parameters of an uninterrupted run and of one that goes on from a checkpoint."""
    rank = dist.get_rank(group)

    def go_on(module, optimizer, first, last):
        for index in range(first, last):
            step(module, optimizer, index, rank, warming_up=index < 3)

    module = Net(norm=False)
    optimizer = optimizer_of(module, QuantizedAdam, group=group, bits=3)
    go_on(module, optimizer, 0, saved_at)
    saved = through_a_file({"module": module.state_dict(), "optimizer": optimizer.state_dict()})
    go_on(module, optimizer, saved_at, 8)
    again = Net(norm=False, seed=9)
    fresh = optimizer_of(again, QuantizedAdam, group=group, bits=3)
    again.load_state_dict(saved["module"])
    fresh.load_state_dict(saved["optimizer"])
    go_on(again, fresh, saved_at, 8)
    return parameters(module), parameters(again)


def non_finite(group, warming_up, value):
    """A gradient of rank 1 that is not finite."""
    rank = dist.get_rank(group)
    module = Net(norm=False)
    optimizer = optimizer_of(module, QuantizedAdam, group=group, bits=4)
    step(module, optimizer, 0, rank, warming_up=True)
    backward(module, *batch(1, rank))
    if rank == 1:
        module.middle.weight.grad[3, 5] = value
    optimizer.set_warmup(warming_up)
    optimizer.average_gradients()
    optimizer.step()


def unseen(group):
    """A row that has no gradient in the warm-up and one afterwards, before and after."""
    embedding = torch.nn.Embedding(4, 8)
    torch.nn.init.ones_(embedding.weight)
    optimizer = QuantizedAdam(embedding.parameters(), lr=0.1, weight_decay=0.0, group=group, bits=4)
    for index in range(4):
        embedding(torch.tensor([0, 1] if index < 2 else [1, 3])).sum().backward()
        optimizer.set_warmup(index < 2)
        optimizer.average_gradients()
        optimizer.step()
        optimizer.zero_grad()
    return embedding.weight.detach().clone()


def at_once(group):
    """No step of warm-up at all."""
    optimizer = QuantizedAdam(Net().parameters(), group=group, bits=4)
    optimizer.set_warmup(False)


def unaveraged(group):
    """A step of warm-up whose gradients were not averaged."""
    QuantizedAdam(Net().parameters(), group=group, bits=4).step()
