"""All communication of this package between the ranks of a mesh axis, with byte counts."""

from __future__ import annotations

import contextlib
import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dilated_attention_pytorch.plan.gather_rounds import Hop, around, gather_rounds

from .failure import RankFailure, RankGroup, disagreement
from .groups import all_groups, as_long_as_all, break_off, is_of_transport, timeout_of
from .monitor import Monitor
from .traffic import COUNTERS

# Renamed between the oldest torch that this package accepts and the newest.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Message tags; call numbers are below.
_AGREEMENT_TAG = 1 << 30

_MOST_AGREED = 1 << 16


class Pending:
    """Messages in transit. Holds the tensors until completion."""

    def __init__(
        self, communicator: Communicator, works: Sequence[dist.Work], tensors: Sequence[Tensor], waits: str
    ) -> None:
        self._communicator = communicator
        self._works = works
        self._tensors = tensors
        self._waits = waits

    def wait(self) -> None:
        """Wait until all messages have been received and sent.

        Raises:
            RankFailure: a rank died, does not respond or makes another call.
        """
        with self._communicator.explained(self._waits):
            for work in self._works:
                self._communicator.wait(work)
        # gloo blocks forever on a work that was already waited for.
        self._works, self._tensors = (), ()


_Exchanging = Callable[[Mapping[int, Tensor], Mapping[int, Tensor], int, str], Pending]


def _taken(tensors: Tensor, first: int, hop: Hop) -> Tensor:
    """The message of a hop: ``num_tensors`` of ``[members, *shape]`` from member ``first`` on, cyclically."""
    parts = [tensors[rows] for rows, _ in around(first, hop.num_tensors, len(tensors))]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _room(tensors: Tensor, first: int, hop: Hop) -> Tensor:
    """Buffer for such a message: its place in ``[members, *shape]`` if that is contiguous, else a new tensor."""
    parts = around(first, hop.num_tensors, len(tensors))
    return tensors[parts[0][0]] if len(parts) == 1 else tensors.new_empty(hop.num_tensors, *tensors.shape[1:])


class Communicator:
    """The ranks along one axis of a mesh, from this rank's view. Made by :func:`communicator_of`."""

    def __init__(self, group: dist.ProcessGroup, device_type: str) -> None:
        self.group = group
        self.ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(group))
        """Global ranks, in the order of the axis."""
        self.rank = dist.get_rank(group)
        self.size = len(self.ranks)
        # A group can have one backend per device type; its own name gives only one of them.
        backend = group._get_backend(torch.device(device_type)).name()
        is_nccl, self._is_gloo = backend == "nccl", backend == "gloo"
        self.device = torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")
        self.has_tags = not is_nccl
        """Whether messages carry tags. Collectives carry none, so with tags everything is sent as messages: a rank that
        skips a call is then detected instead of receiving data of another call."""
        self._timeout = as_long_as_all(group)
        self._num_calls = 0
        self._agreed: set[int] = set()
        self._rank_group: RankGroup | None = None
        if self.size > 1:
            self._rank_group = RankGroup(_connections().monitor, group.group_name, self.ranks)

    def agree(self, call: Mapping[str, object]) -> int:
        """Check, once per distinct ``call``, that all ranks make it; later calls only look it up in a set.

        Returns:
            a number below ``2**28`` that tags this call's messages, so that they are never confused with those of
            another call or of a repetition.

        Raises:
            RankFailure: a rank makes another call; the message names the rank and the difference.
        """
        if self._rank_group is None:
            return 0
        said = {name: str(value) for name, value in call.items()}
        self._num_calls += 1
        digest = int.from_bytes(hashlib.blake2b(json.dumps(said).encode(), digest_size=7).digest())
        number = zlib.crc32(f"{self._num_calls} {digest}".encode()) % (1 << 28)
        self._rank_group.enter(said, self._num_calls)
        if digest in self._agreed:
            return number
        header = torch.tensor([self._num_calls, digest], device=self.device)
        doing = "comparing the call with the other ranks"
        headers = self._gather(header, range(self.size), _AGREEMENT_TAG, doing, self._exchange).tolist()
        if not self._agreed:
            self._rank_group.expect()
        if any(other != headers[0] for other in headers):
            calls = self.all_gather_json(said, tag=_AGREEMENT_TAG + 1)
            raise RankFailure(disagreement([number for number, _ in headers], calls, self.ranks))
        if len(self._agreed) >= _MOST_AGREED:  # on all ranks at the same call
            self._agreed.clear()
        self._agreed.add(digest)
        return number

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], tag: int, doing: str) -> Pending:
        """Start sending contiguous tensors to ranks of this axis and receiving tensors from them."""
        for peer, tensor in sends.items():
            self._count(sent=tensor.nbytes, peer=peer)
        for tensor in receives.values():
            self._count(received=tensor.nbytes)
        return self._exchange(sends, receives, tag, doing)

    def all_gather(self, tensor: Tensor, members: Sequence[int] | None = None, *, tag: int) -> Tensor:
        """All-gather: ``[members, *shape]`` of the equally shaped tensors of ``members`` (ranks of this axis; all by
        default).

        Direct or forwarded, as :func:`gather_rounds` says. A subset of the axis gathers by messages: creating a group
        for it would need all ranks.
        """
        members = range(self.size) if members is None else members
        if self._is_collective(members):
            self._count_collective(tensor.nbytes)
        return self._gather(tensor, members, tag, "gathering rows", self.exchange)

    def all_gather_json(self, value: object, *, tag: int) -> list[Any]:
        """All-gather of values of JSON, in the order of the axis."""
        encoded = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self.device)
        lengths = self.all_gather(torch.tensor([len(encoded)], device=self.device), tag=tag).view(-1).tolist()
        padded = encoded.new_zeros(max(lengths))
        padded[: len(encoded)] = encoded
        rows = self.all_gather(padded, tag=tag).cpu()
        return [json.loads(bytes(row[:length].tolist())) for row, length in zip(rows, lengths, strict=True)]

    def reduce_scatter(self, tensor: Tensor, members: Sequence[int], *, tag: int) -> Tensor:
        """Reduce-scatter of ``[members, *shape]``: the sum of all members' tensors at this rank's index, ``[*shape]``.

        The rounds of :meth:`all_gather` in reverse; ``tensor`` is modified on the way.
        """
        tensor, size, own_index = tensor.contiguous(), len(members), list(members).index(self.rank)
        if self._is_collective(members):
            result = torch.empty_like(tensor[0])
            self._count_collective(result.nbytes)
            with self.explained("adding up gradients"):
                _REDUCE_SCATTER(result.view(-1), tensor.view(-1), group=self.group)
            return result
        for hops in reversed(gather_rounds(size, tensor[0].nbytes)):
            sends = {
                members[(own_index + hop.distance) % size]: _taken(tensor, own_index + hop.distance, hop)
                for hop in hops
            }
            receives = {
                members[(own_index - hop.distance) % size]: tensor.new_empty(hop.num_tensors, *tensor.shape[1:])
                for hop in hops
            }
            self.exchange(sends, receives, tag, "adding up gradients").wait()
            for part in receives.values():
                for rows, of_message in around(own_index, len(part), size):
                    tensor[rows] += part[of_message]
        return tensor[own_index].clone()

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Broadcast ``tensor`` in place from rank ``source`` of this axis."""
        if self.rank == source:
            for peer in range(self.size):
                if peer != self.rank:
                    self._count(sent=tensor.nbytes, peer=peer)
        else:
            self._count(received=tensor.nbytes)
        with self.explained("broadcasting"):
            dist.broadcast(tensor, group_src=source, group=self.group)
        return tensor

    def wait(self, work: dist.Work) -> None:
        """Wait until ``work`` is done."""
        if self._is_gloo:
            # Without an explicit timeout, messages use the one that the group was created with.
            work.wait(self._timeout)
        else:
            work.wait()

    @contextlib.contextmanager
    def explained(self, doing: str) -> Iterator[None]:
        """Context that turns a transport error into one that names the failed rank and the cause."""
        if self._rank_group is None:
            yield
            return
        with self._rank_group.waiting(doing, can_interrupt=self._is_gloo):
            yield

    @contextlib.contextmanager
    def announced(self) -> Iterator[None]:
        """Context that publishes when this rank raises, so that the others do not wait until their timeout."""
        try:
            yield
        except (TypeError, ValueError, NotImplementedError) as error:
            if self._rank_group is not None:
                self._rank_group.refuse(error)
            raise

    def _exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], tag: int, doing: str) -> Pending:
        """:meth:`exchange` without counting."""
        # gloo sends a message once its receiver has announced a buffer for it. Receives come first, so that those
        # announcements do not queue behind this rank's own messages.
        operations = [
            dist.P2POp(operation, tensor, group=self.group, tag=tag, group_peer=peer)
            for operation, messages in ((dist.irecv, receives), (dist.isend, sends))
            for peer, tensor in messages.items()
        ]
        peers = sorted(self.ranks[peer] for peer in {*sends, *receives})
        waits = f"{doing} (with rank {', '.join(map(str, peers))})"
        with self.explained(waits):
            works = dist.batch_isend_irecv(operations) if operations else []
        return Pending(self, works, [*sends.values(), *receives.values()], waits)

    def _is_collective(self, members: Sequence[int]) -> bool:
        """Whether the transport's own collectives are used."""
        return len(members) == self.size and not self.has_tags

    def _gather(self, tensor: Tensor, members: Sequence[int], tag: int, doing: str, exchange: _Exchanging) -> Tensor:
        """:meth:`all_gather` by :meth:`exchange`, or uncounted by :meth:`_exchange`."""
        tensor = tensor.contiguous()
        gathered = tensor.new_empty(len(members), *tensor.shape)
        if self._is_collective(members):
            with self.explained(doing):
                _ALL_GATHER(gathered.view(-1), tensor.view(-1), group=self.group)
            return gathered
        size, own_index = len(members), list(members).index(self.rank)
        gathered[own_index] = tensor
        for hops in gather_rounds(size, tensor.nbytes):
            sends = {members[(own_index - hop.distance) % size]: _taken(gathered, own_index, hop) for hop in hops}
            receives = {
                members[(own_index + hop.distance) % size]: _room(gathered, own_index + hop.distance, hop)
                for hop in hops
            }
            exchange(sends, receives, tag, doing).wait()
            for hop, message in zip(hops, receives.values(), strict=True):
                parts = around(own_index + hop.distance, hop.num_tensors, size)
                if len(parts) > 1:
                    for rows, of_message in parts:
                        gathered[rows] = message[of_message]
        return gathered

    def _count_collective(self, num_bytes: int) -> None:
        """Count what :meth:`all_gather`, or its reverse, would send and receive from rank to rank."""
        for hops in gather_rounds(self.size, num_bytes):
            for hop in hops:
                total = hop.num_tensors * num_bytes
                self._count(sent=total, received=total, peer=(self.rank - hop.distance) % self.size)

    def _count(self, *, sent: int = 0, received: int = 0, peer: int | None = None) -> None:
        for traffic in COUNTERS:
            traffic.sent += sent
            traffic.received += received
            if peer is not None:
                traffic.messages += 1
                to = self.ranks[peer]
                traffic.sent_to[to] = traffic.sent_to.get(to, 0) + sent


def communicator_of(mesh: DeviceMesh, dim: int = 0) -> Communicator:
    """The ranks along dimension ``dim`` of ``mesh``.

    Raises:
        TypeError: ``mesh`` is not a ``DeviceMesh``.
        ValueError: the ranks along the dimension are not in ascending order.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            'mesh must be a DeviceMesh, such as init_device_mesh("cuda", (8,)) of torch.distributed.device_mesh, '
            f"got {type(mesh).__name__}"
        )
    group = mesh.get_group(dim)
    communicators = _connections().communicators
    name = (group.group_name, mesh.device_type)
    if name not in communicators:
        communicators[name] = Communicator(group, mesh.device_type)
    coordinate = mesh.get_coordinate()
    if coordinate is not None and coordinate[dim] != communicators[name].rank:
        raise ValueError(
            f"the ranks along dimension {dim} of the mesh must ascend, as process groups order them: got the mesh "
            f"{mesh.mesh.tolist()}; init_device_mesh makes such a mesh"
        )
    return communicators[name]


def world_mesh(device_type: str) -> DeviceMesh | None:
    """A 1-D mesh of all ranks of the process group; None in a single process."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    meshes = _connections().meshes
    if device_type not in meshes:
        assert dist.group.WORLD is not None
        meshes[device_type] = DeviceMesh.from_group(dist.group.WORLD, device_type)
    return meshes[device_type]


@dataclass(slots=True)
class _Connections:
    """Connections that live as long as the process group."""

    store: dist.Store
    monitor: Monitor
    communicators: dict[tuple[str, str], Communicator] = field(default_factory=dict)
    """By group name and device type."""
    meshes: dict[str, DeviceMesh] = field(default_factory=dict)


_CONNECTIONS: list[_Connections] = []
"""The current connections, at most one."""


def _connections() -> _Connections:
    store = dist.distributed_c10d._get_default_store()
    if not _CONNECTIONS or _CONNECTIONS[0].store is not store:

        def is_over() -> bool:
            return not dist.is_initialized() or dist.distributed_c10d._get_default_store() is not store

        timeout = timeout_of(dist.group.WORLD).total_seconds()
        monitor = Monitor(store, dist.get_rank(), dist.get_world_size(), timeout, is_over, break_off)
        _CONNECTIONS[:] = [_Connections(store, monitor)]
    return _CONNECTIONS[0]


@contextlib.contextmanager
def naming_ranks(doing: str) -> Iterator[None]:
    """Context in which errors of the program's own collectives, in all its groups, name the failed rank.

    Args:
        doing: description of the block's activity.

    Raises:
        RankFailure: a rank died, does not respond, or does not take part.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    monitor, ranks = _connections().monitor, range(dist.get_world_size())
    for group in all_groups():
        as_long_as_all(group)
    monitor.wait_at_most(timeout_of(dist.group.WORLD).total_seconds())
    rank_group = RankGroup(monitor, f"all, {doing}", ranks)
    rank_group.expect()
    try:
        yield
    except RankFailure:
        raise
    except RuntimeError as error:
        if not is_of_transport(error):
            raise
        rank_group.waits = doing
        raise RankFailure(f"{doing}: {rank_group.diagnose(error, doing)}") from error
