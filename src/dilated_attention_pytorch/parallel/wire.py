"""Messages between the ranks of one axis of a mesh, counted: all that this package sends, it sends here."""

from __future__ import annotations

import contextlib
import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .failure import Board, RankFailure, disagreement
from .groups import all_groups, as_long_as_all, break_off, is_of_transport, timeout_of
from .roll_call import RollCall
from .watch import Watch


@dataclass(slots=True)
class Traffic:
    """Bytes of tensors that this rank sent and received between :func:`count_traffic` and its end."""

    sent: int = 0
    received: int = 0
    messages: int = 0
    """Tensors sent; a collective counts as one for every other rank that takes part."""
    sent_to: dict[int, int] = field(default_factory=dict)
    """Bytes sent, by the receiver's global rank."""


# Renamed between the oldest torch that this package accepts and the newest.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Tags of messages: numbers of calls are below.
_AGREEMENT_TAG = 1 << 30

_MOST_AGREED = 1 << 16

_COUNTERS: list[Traffic] = []


@contextlib.contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count what this process sends and receives through this package while the block runs.

    >>> from dilated_attention_pytorch import parallel
    >>> with parallel.count_traffic() as traffic:
    ...     pass  # parallel.attend(...)
    >>> traffic.sent
    0
    """
    traffic = Traffic()
    _COUNTERS.append(traffic)
    try:
        yield traffic
    finally:
        _COUNTERS.remove(traffic)


class Pending:
    """Messages under way. The tensors are kept until they have arrived."""

    def __init__(self, wire: Wire, works: Sequence[dist.Work], tensors: Sequence[Tensor], waits: str) -> None:
        self._wire = wire
        self._works = works
        self._tensors = tensors
        self._waits = waits

    def wait(self) -> None:
        """Return when all messages have arrived and been sent.

        Raises:
            RankFailure: a rank died, does not answer or does something else.
        """
        with self._wire.explained(self._waits):
            for work in self._works:
                self._wire.wait(work)
        # gloo waits for ever for what it has waited for before.
        self._works, self._tensors = (), ()


class Wire:
    """The ranks along one axis of a mesh, as this rank sees them. Made by :func:`wire_of`."""

    def __init__(self, group: dist.ProcessGroup, device_type: str) -> None:
        self.group = group
        self.ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(group))
        """The global ranks, in the order of the axis."""
        self.rank = dist.get_rank(group)
        self.size = len(self.ranks)
        # A group can have a backend for every kind of device; its own name tells only one of them.
        backend = group._get_backend(torch.device(device_type)).name()
        is_nccl, self._is_gloo = backend == "nccl", backend == "gloo"
        self.device = torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")
        self.has_tags = not is_nccl
        """Whether messages carry tags. Collectives carry none, so where messages do, they are used for everything: a
        rank that left something out is then found out, and not served what was meant for another call."""
        self._timeout = as_long_as_all(group)
        self._num_calls = 0
        self._agreed: set[int] = set()
        self._board: Board | None = None
        if self.size > 1:
            known = _connections()
            self._board = Board(known.roll_call, known.watch, group.group_name, self.ranks)

    def agree(self, call: Mapping[str, object]) -> int:
        """Make sure once for every ``call`` that all ranks make it; later calls cost a look into a set.

        Returns:
            a number below ``2**28`` for this one of all calls on the axis, which marks its messages: those of another
            call, or of the same call made once more, are never taken for them.

        Raises:
            RankFailure: a rank makes another call; the message names the rank and what differs.
        """
        if self._board is None:
            return 0
        said = {name: str(value) for name, value in call.items()}
        text = json.dumps(said).encode()
        self._num_calls += 1
        digest = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest())
        number = zlib.crc32(f"{self._num_calls} {digest}".encode()) % (1 << 28)
        self._board.enter(said, self._num_calls)
        if digest in self._agreed:
            return number
        encoded = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self.device)
        header = torch.tensor([self._num_calls, digest, len(encoded)], device=self.device)
        doing = "comparing the call with the other ranks"
        headers = self._gather(header, range(self.size), _AGREEMENT_TAG, doing).tolist()
        if not self._agreed:
            self._board.meet()
        if any(other != headers[0] for other in headers):
            padded = encoded.new_zeros(max(length for _, _, length in headers))
            padded[: len(encoded)] = encoded
            texts = self._gather(padded, range(self.size), _AGREEMENT_TAG + 1, doing).cpu()
            calls = [
                json.loads(bytes(row[:length].tolist())) for row, (_, _, length) in zip(texts, headers, strict=True)
            ]  # fmt: skip
            raise RankFailure(disagreement([number for number, _, _ in headers], calls, self.ranks))
        if len(self._agreed) >= _MOST_AGREED:  # on all ranks at the same call
            self._agreed.clear()
        self._agreed.add(digest)
        return number

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], tag: int, doing: str) -> Pending:
        """Begin to send contiguous tensors to ranks of this axis and to receive tensors from ranks of it."""
        for peer, tensor in sends.items():
            self._count(sent=tensor.nbytes, peer=peer)
        for tensor in receives.values():
            self._count(received=tensor.nbytes)
        return self._exchange(sends, receives, tag, doing)

    def all_gather(self, tensor: Tensor, members: Sequence[int] | None = None, *, tag: int) -> Tensor:
        """``[members, *shape]``: the tensors of equal shape of all ``members`` (ranks of this axis; all without it).

        Some ranks of an axis do it by one batch of messages: a group of their own would have to be made by all ranks.
        """
        members = range(self.size) if members is None else members
        for peer in members:
            if peer != self.rank:
                self._count(sent=tensor.nbytes, received=tensor.nbytes, peer=peer)
        return self._gather(tensor, members, tag, "gathering rows")

    def reduce_scatter(self, tensor: Tensor, members: Sequence[int], *, tag: int) -> Tensor:
        """From ``[members, *shape]`` the sum over the members of what each has in this rank's place: ``[*shape]``."""
        tensor = tensor.contiguous()
        if len(members) < self.size or self.has_tags:
            others = [(place, peer) for place, peer in enumerate(members) if peer != self.rank]
            receives = {peer: torch.empty_like(tensor[0]) for _, peer in others}
            sends = {peer: tensor[place] for place, peer in others}
            self.exchange(sends, receives, tag, "adding up gradients").wait()
            result = tensor[list(members).index(self.rank)].clone()
            for part in receives.values():
                result += part
            return result
        result = torch.empty_like(tensor[0])
        for peer in members:
            if peer != self.rank:
                self._count(sent=result.nbytes, received=result.nbytes, peer=peer)
        with self.explained("adding up gradients"):
            _REDUCE_SCATTER(result.view(-1), tensor.view(-1), group=self.group)
        return result

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """``tensor`` of rank ``source`` of this axis on every rank, written into ``tensor``."""
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
        """Return when ``work`` is done."""
        if self._is_gloo:
            # Its messages have the timeout that the group was made with, unless they are told another one.
            work.wait(self._timeout)
        else:
            work.wait()

    @contextlib.contextmanager
    def explained(self, doing: str) -> Iterator[None]:
        """Turn an error of the transport into one that names the rank and what happened to it."""
        if self._board is None:
            yield
            return
        with self._board.waiting(doing, is_in_reach=self._is_gloo):
            yield

    @contextlib.contextmanager
    def announced(self) -> Iterator[None]:
        """Leave word for the other ranks where this one refuses a call: they would wait for it until their timeout."""
        try:
            yield
        except (TypeError, ValueError, NotImplementedError) as error:
            if self._board is not None:
                self._board.refuse(error)
            raise

    def _exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], tag: int, doing: str) -> Pending:
        """:meth:`exchange`, uncounted."""
        operations = [
            dist.P2POp(dist.isend, tensor, group=self.group, tag=tag, group_peer=peer) for peer, tensor in sends.items()
        ] + [
            dist.P2POp(dist.irecv, tensor, group=self.group, tag=tag, group_peer=peer)
            for peer, tensor in receives.items()
        ]  # fmt: skip
        peers = sorted(self.ranks[peer] for peer in {*sends, *receives})
        waits = f"{doing} (with rank {', '.join(map(str, peers))})"
        with self.explained(waits):
            works = dist.batch_isend_irecv(operations) if operations else []
        return Pending(self, works, [*sends.values(), *receives.values()], waits)

    def _gather(self, tensor: Tensor, members: Sequence[int], tag: int, doing: str) -> Tensor:
        """:meth:`all_gather`, uncounted."""
        tensor = tensor.contiguous()
        gathered = tensor.new_empty(len(members), *tensor.shape)
        if len(members) == self.size and not self.has_tags:
            with self.explained(doing):
                _ALL_GATHER(gathered.view(-1), tensor.view(-1), group=self.group)
            return gathered
        others = [(place, peer) for place, peer in enumerate(members) if peer != self.rank and tensor.numel()]
        receives = {peer: gathered[place] for place, peer in others}
        pending = self._exchange({peer: tensor for _, peer in others}, receives, tag, doing)
        gathered[list(members).index(self.rank)] = tensor
        pending.wait()
        return gathered

    def _count(self, *, sent: int = 0, received: int = 0, peer: int | None = None) -> None:
        for traffic in _COUNTERS:
            traffic.sent += sent
            traffic.received += received
            if peer is not None:
                traffic.messages += 1
                to = self.ranks[peer]
                traffic.sent_to[to] = traffic.sent_to.get(to, 0) + sent


def wire_of(mesh: DeviceMesh, dim: int = 0) -> Wire:
    """The ranks along dimension ``dim`` of ``mesh``.

    Raises:
        TypeError: ``mesh`` is no ``DeviceMesh``.
        ValueError: the ranks along the dimension are not in ascending order.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            'mesh must be a DeviceMesh, such as init_device_mesh("cuda", (8,)) of torch.distributed.device_mesh, '
            f"got {type(mesh).__name__}"
        )
    group = mesh.get_group(dim)
    wires = _connections().wires
    name = (group.group_name, mesh.device_type)
    if name not in wires:
        wires[name] = Wire(group, mesh.device_type)
    coordinate = mesh.get_coordinate()
    if coordinate is not None and coordinate[dim] != wires[name].rank:
        raise ValueError(
            f"the ranks along dimension {dim} of the mesh must ascend, as process groups order them: got the mesh "
            f"{mesh.mesh.tolist()}; init_device_mesh makes such a mesh"
        )
    return wires[name]


def whole_world(device_type: str) -> DeviceMesh | None:
    """A 1-D mesh of all ranks of the process group; None where there is one process."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    meshes = _connections().meshes
    if device_type not in meshes:
        assert dist.group.WORLD is not None
        meshes[device_type] = DeviceMesh.from_group(dist.group.WORLD, device_type)
    return meshes[device_type]


@dataclass(slots=True)
class _Connections:
    """What is known of the ranks for as long as the process group is the same."""

    store: dist.Store
    roll_call: RollCall
    watch: Watch
    wires: dict[tuple[str, str], Wire] = field(default_factory=dict)
    """By the name of the group and the kind of device."""
    meshes: dict[str, DeviceMesh] = field(default_factory=dict)


_CONNECTIONS: list[_Connections] = []
"""At most one."""


def _connections() -> _Connections:
    store = dist.distributed_c10d._get_default_store()
    if not _CONNECTIONS or _CONNECTIONS[0].store is not store:

        def is_over() -> bool:
            return not dist.is_initialized() or dist.distributed_c10d._get_default_store() is not store

        roll_call = RollCall(store, dist.get_rank(), timeout_of(dist.group.WORLD).total_seconds(), is_over)
        _CONNECTIONS[:] = [_Connections(store, roll_call, Watch(roll_call, break_off, is_over))]
    return _CONNECTIONS[0]


@contextlib.contextmanager
def naming_ranks(doing: str) -> Iterator[None]:
    """Errors of the program's own collectives, in all groups that it made, become errors that name the rank.

    Args:
        doing: what the ranks do in the block, in words.

    Raises:
        RankFailure: a rank died, does not answer, or takes no part.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    known, ranks = _connections(), range(dist.get_world_size())
    for group in all_groups():
        as_long_as_all(group)
    known.roll_call.wait_at_most(timeout_of(dist.group.WORLD).total_seconds())
    board = Board(known.roll_call, known.watch, f"all, {doing}", ranks)
    board.meet()
    try:
        yield
    except RankFailure:
        raise
    except RuntimeError as error:
        if not is_of_transport(error):
            raise
        board.waits = doing
        raise RankFailure(f"{doing}: {board.diagnose(error, doing)}") from error
