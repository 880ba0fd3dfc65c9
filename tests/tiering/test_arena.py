from __future__ import annotations

import ctypes
import gc
import itertools
import os
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tiering.arena import Arena, Placement, Slot
from tiering.errors import ArenaFullError, ConfigError, EngineClosedError, RecordError
from tiering.spec import RecordSpec, TensorSpec

PAGE = 4096


def record(*tensors: tuple[torch.dtype, tuple[int, ...]]) -> RecordSpec:
    """A record of tensors named t0, t1, ..."""
    return RecordSpec(
        "record",
        tuple(TensorSpec(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(tensors)),
    )


def flat(nbytes: int) -> RecordSpec:
    """A record of plain bytes."""
    return record((torch.uint8, (nbytes,)))


def extents(arena: Arena) -> tuple[int, int]:
    """Free bytes, and how many of them are in one piece."""
    stats = arena.stats()
    return stats.capacity_bytes - stats.used_bytes, stats.largest_free_bytes


def test_a_slot_has_the_bytes_asked_for_rounded_up_to_the_alignment() -> None:
    """One byte more than a page costs one page more, and nothing is rounded further."""
    arena = Arena(1 << 20)
    for asked, expected in [(0, PAGE), (1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE)]:
        slot = arena.allocate(asked, owner="a")
        assert slot.nbytes == expected
        assert slot.address % PAGE == 0
        slot.free()


def test_a_size_that_is_not_positive_is_refused() -> None:
    """A bad size is an argument error, not an empty arena."""
    with pytest.raises(ConfigError, match="positive"):
        Arena(0)


def test_passing_slots_come_from_the_low_end_and_lasting_ones_from_the_high_end() -> None:
    """The two kinds do not mix, so that the middle stays whole."""
    arena = Arena(8 * PAGE)
    passing = [arena.allocate(1, owner="p") for _ in range(2)]
    lasting = [arena.allocate(1, owner="l", placement=Placement.LASTING) for _ in range(2)]
    assert [slot.start for slot in passing] == [0, PAGE]
    assert [slot.start for slot in lasting] == [7 * PAGE, 6 * PAGE]
    assert extents(arena) == (4 * PAGE, 4 * PAGE)


def test_the_smallest_hole_that_fits_is_used() -> None:
    """Large extents are kept for large records."""
    arena = Arena(16 * PAGE)
    slots = [arena.allocate(pages * PAGE, owner="a") for pages in (3, 1, 2, 1)]
    slots[0].free()
    slots[2].free()
    assert arena.allocate(2 * PAGE, owner="b").start == slots[2].start


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_neighbours_join_again_in_whatever_order_they_are_freed(order: tuple[int, ...]) -> None:
    """No sequence of frees leaves the arena in pieces."""
    arena = Arena(3 * PAGE)
    slots = [arena.allocate(1, owner="a") for _ in range(3)]
    for at in order:
        slots[at].free()
    assert extents(arena) == (3 * PAGE, 3 * PAGE)


def test_a_full_arena_says_who_holds_what_and_what_to_do() -> None:
    """The message has the request, the room there is, the holders by size, and the setting."""
    arena = Arena(4 * PAGE)
    small = arena.allocate(1, owner="layer.0")
    arena.allocate(2 * PAGE, owner="layer.1")
    kept = arena.allocate(1, owner="layer.2")
    alias = kept.tensors(flat(1))
    kept.free()
    small.free()
    assert arena.try_allocate(2 * PAGE, owner="layer.3") is None
    with pytest.raises(ArenaFullError) as caught:
        arena.allocate(2 * PAGE, owner="layer.3")
    for words in (
        "'layer.3' asked for 8192 bytes; of 16384 bytes 4096 are free, the largest extent 4096",
        "held by layer.1 (8192 bytes)",
        "still alive: layer.2 (4096 bytes)",
        "raise tiering.host_memory",
    ):
        assert words in str(caught.value)
    del alias


def test_a_long_list_of_holders_is_cut_short() -> None:
    """A message stays readable with a thousand records in the arena."""
    arena = Arena(10 * PAGE)
    for number in range(10):
        arena.allocate(1, owner=f"layer.{number}")
    with pytest.raises(ArenaFullError, match=r"layer\.3 \(4096 bytes\), 6 more \(24576 bytes\)"):
        arena.allocate(1, owner="one more")


def test_the_tensors_of_a_record_are_views_of_the_slot_one_after_another() -> None:
    """Scalars and empty tensors too; all on one storage."""
    arena = Arena(1 << 20)
    spec = record(
        (torch.float64, (2, 3)),
        (torch.float32, ()),
        (torch.bfloat16, (0, 5)),
        (torch.float16, (3,)),
        (torch.bool, (2,)),
    )
    slot = arena.allocate(spec.nbytes, owner="a")
    tensors = slot.tensors(spec)
    assert [(t.dtype, tuple(t.shape)) for t in tensors.values()] == [
        (t.dtype, t.shape) for t in spec.tensors
    ]
    offsets = [t.data_ptr() - slot.address for t in tensors.values() if t.numel()]
    assert offsets == [0, 48, 52, 58]
    assert len({t.untyped_storage().data_ptr() for t in tensors.values()}) == 1
    tensors["t0"].fill_(7)
    assert slot.tensors(spec)["t0"].eq(7).all()


def test_a_record_without_any_element_has_tensors_too() -> None:
    """Zero bytes are an ordinary size."""
    slot = Arena(PAGE).allocate(0, owner="a")
    assert slot.tensors(record((torch.float32, (0,))))["t0"].shape == (0,)
    assert not slot.is_aliased


def test_tensors_of_one_record_do_not_share_a_version_counter() -> None:
    """An in-place change of one weight must not make autograd think another was changed."""
    slot = Arena(PAGE).allocate(8, owner="a")
    weights = slot.tensors(record((torch.float32, (1,)), (torch.float32, (1,))))
    kept, changed = (t.fill_(2).requires_grad_() for t in weights.values())
    loss = (kept * kept).sum()
    with torch.no_grad():
        changed.add_(1)
    loss.backward()
    assert kept.grad == 4


def test_tensors_made_in_inference_mode_can_be_trained_afterwards() -> None:
    """A record fetched during evaluation is used again by the next training step."""
    slot = Arena(PAGE).allocate(4, owner="a")
    with torch.inference_mode():
        weight = slot.tensors(record((torch.float32, (1,))))["t0"]
    assert not weight.is_inference()
    weight.fill_(3).requires_grad_().square().backward()
    assert weight.grad == 6


def test_tensors_are_in_host_memory_whatever_the_default_device_is() -> None:
    """A user's default device is for the user's tensors."""
    slot = Arena(PAGE).allocate(4, owner="a")
    with torch.device("meta"):
        assert slot.tensors(flat(4))["t0"].device.type == "cpu"


def test_what_pads_a_slot_is_zero() -> None:
    """Equal records make equal files, whatever stood in the memory before."""
    arena = Arena(PAGE)
    dirty = arena.allocate(PAGE, owner="a")
    dirty.tensors(flat(PAGE))["t0"].fill_(255)
    dirty.free()
    clean = arena.allocate(10, owner="b").tensors(flat(PAGE))["t0"]
    assert clean[10:].eq(0).all()


def test_a_freed_slot_keeps_its_room_until_the_last_tensor_over_it_is_gone() -> None:
    """A user's alias neither dangles nor changes, and the statistics show it."""
    arena = Arena(PAGE)
    slot = arena.allocate(PAGE, owner="a")
    alias = slot.tensors(flat(PAGE))["t0"].fill_(5).detach()[100:].view(-1)
    slot.free()
    assert slot.is_aliased
    assert arena.stats().retained_bytes == PAGE
    assert arena.try_allocate(1, owner="b") is None
    assert alias.eq(5).all()
    del alias
    assert not slot.is_aliased
    assert arena.stats().retained_bytes == 0
    assert arena.try_allocate(1, owner="b") is not None


def test_a_view_saved_by_autograd_keeps_the_room_as_well() -> None:
    """What backward still needs is not handed to another record."""
    arena = Arena(PAGE)
    slot = arena.allocate(PAGE, owner="a")
    weight = slot.tensors(record((torch.float32, (2, 3))))["t0"].fill_(1).requires_grad_()
    inputs = torch.ones(1, 2, requires_grad=True)
    loss = (inputs @ weight).sum()
    del weight
    slot.free()
    assert arena.try_allocate(1, owner="b") is None
    loss.backward()
    assert inputs.grad is not None
    assert inputs.grad.eq(3).all()
    del loss
    assert arena.try_allocate(1, owner="b") is not None


def test_tensors_that_die_in_a_reference_cycle_give_the_room_back_when_collected() -> None:
    """The collector may run anywhere, even while the arena is at work."""
    arena = Arena(PAGE)
    slot = arena.allocate(PAGE, owner="a")
    cycle: list[object] = [slot.tensors(flat(1))]
    cycle.append(cycle)
    slot.free()
    del cycle
    gc.collect()
    assert arena.try_allocate(1, owner="b") is not None


def test_tensors_may_die_on_any_thread_while_others_allocate() -> None:
    """No lock is taken where a tensor dies; the room comes back all the same."""
    arena = Arena(64 * PAGE)

    def work() -> None:
        for _ in range(200):
            slot = arena.try_allocate(PAGE, owner="a")
            if slot is not None:
                tensors = slot.tensors(flat(PAGE))
                slot.free()
                del tensors

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert extents(arena) == (64 * PAGE, 64 * PAGE)


def test_a_finalizer_may_free_a_slot_while_the_arena_is_at_work() -> None:
    """A collection can start anywhere, also under the arena's lock; nothing blocks or is lost."""
    arena = Arena(2 * PAGE)
    slot = arena.allocate(1, owner="a")
    with arena._lock:
        slot.free()
    assert extents(arena) == (2 * PAGE, 2 * PAGE)


def test_a_freed_slot_cannot_be_used() -> None:
    """Neither by a transfer nor for a tensor; freeing it again is harmless."""
    arena = Arena(2 * PAGE)
    slot = arena.allocate(1, owner="layer.0")
    slot.free()
    slot.free()
    other = arena.allocate(1, owner="layer.1")
    slot.free()
    assert other.address
    with pytest.raises(RecordError, match=r"'layer\.0' \(4096 bytes\) was freed"):
        _ = slot.address
    with pytest.raises(RecordError, match="freed"):
        slot.tensors(flat(1))


def test_a_record_larger_than_the_slot_is_refused_with_both_sizes() -> None:
    """A view must not reach into the next slot."""
    slot = Arena(2 * PAGE).allocate(1, owner="a")
    with pytest.raises(RecordError, match="has 4097 bytes, the slot of 'a' only 4096"):
        slot.tensors(flat(4097))


def test_tensors_outlive_a_closed_arena_and_the_arena_itself() -> None:
    """The memory is unmapped after the last tensor, never under it."""
    arena = Arena(1 << 20)
    slot = arena.allocate(1 << 20, owner="a")
    tensor = slot.tensors(flat(1 << 20))["t0"].fill_(9)
    arena.close()
    arena.close()
    with pytest.raises(EngineClosedError, match="closed"):
        arena.allocate(1, owner="b")
    slot.free()
    del arena, slot
    gc.collect()
    assert tensor.eq(9).all()


def test_a_forked_child_gets_an_exception_instead_of_a_crash() -> None:
    """The child has no part of the memory, and the parent's is unharmed."""
    arena = Arena(PAGE)
    slot = arena.allocate(4, owner="a")
    child = os.fork()
    if not child:
        status = 1
        try:
            slot.tensors(flat(4))
        except EngineClosedError:
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert slot.tensors(flat(4))["t0"].fill_(1).eq(1).all()


class ArenaMachine(RuleBasedStateMachine):
    """Any sequence of allocations, tensors and frees, against a list of what must be there."""

    PAGES = 16

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(self.PAGES * PAGE)
        self.held: list[Slot] = []
        self.freed: list[Slot] = []
        self.aliases: list[tuple[Slot, torch.Tensor, int]] = []
        self.fill = 0

    def room(self) -> list[tuple[int, int]]:
        """Where memory is in use: held slots, and freed ones over which a tensor is alive."""
        kept = {id(slot): slot for slot, _, _ in self.aliases if slot.is_freed}
        return sorted((s.start, s.start + s.nbytes) for s in [*self.held, *kept.values()])

    @rule(pages=st.integers(0, PAGES + 1), less=st.integers(0, 100), end=st.sampled_from(Placement))
    def allocate(self, pages: int, less: int, end: Placement) -> None:
        """It succeeds exactly if some gap is large enough."""
        nbytes = max(pages * PAGE - less, 0)
        needed = -(-max(nbytes, 1) // PAGE) * PAGE
        edges = [0, *(edge for extent in self.room() for edge in extent), self.PAGES * PAGE]
        gaps = [edges[i + 1] - edges[i] for i in range(0, len(edges), 2)]
        slot = self.arena.try_allocate(nbytes, owner="a", placement=end)
        assert (slot is not None) == (max(gaps) >= needed)
        if slot is not None:
            self.held.append(slot)

    @precondition(lambda self: self.held)
    @rule(at=st.integers(0, 99))
    def make_tensor(self, at: int) -> None:
        """Write something into a slot and keep a view of it."""
        slot = self.held[at % len(self.held)]
        self.aliases = [(s, t, f) for s, t, f in self.aliases if s is not slot]
        self.fill = self.fill % 255 + 1
        tensor = slot.tensors(flat(slot.nbytes))["t0"].fill_(self.fill)
        self.aliases.append((slot, tensor[:1].expand(2), self.fill))
        self.aliases.append((slot, tensor[-1:], self.fill))

    @precondition(lambda self: self.aliases)
    @rule(at=st.integers(0, 99))
    def drop_tensor(self, at: int) -> None:
        """Let one view die."""
        del self.aliases[at % len(self.aliases)]

    @precondition(lambda self: self.held)
    @rule(at=st.integers(0, 99))
    def free(self, at: int) -> None:
        """Give a slot back, whether or not tensors are alive over it."""
        slot = self.held.pop(at % len(self.held))
        slot.free()
        self.freed.append(slot)

    @invariant()
    def nothing_overlaps_and_nothing_leaks(self) -> None:
        """Every byte is in one slot or free."""
        room = self.room()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(room))
        stats = self.arena.stats()
        assert stats.used_bytes == sum(end - start for start, end in room)
        assert stats.used_bytes <= stats.peak_bytes <= stats.capacity_bytes
        assert stats.retained_bytes == stats.used_bytes - sum(s.nbytes for s in self.held)

    @invariant()
    def no_tensor_that_is_alive_has_changed(self) -> None:
        """Whatever happened to its slot since."""
        assert all(tensor.eq(fill).all() for _, tensor, fill in self.aliases)
        alive = {id(slot) for slot, _, _ in self.aliases}
        assert all(s.is_aliased == (id(s) in alive) for s in [*self.held, *self.freed])

    def teardown(self) -> None:
        """When all is given back, one extent is left."""
        self.aliases.clear()
        for slot in self.held:
            slot.free()
        assert extents(self.arena) == (self.PAGES * PAGE, self.PAGES * PAGE)


ArenaMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestArenaMachine = ArenaMachine.TestCase


@given(
    st.lists(st.tuples(st.integers(1, 5), st.sampled_from(Placement), st.booleans()), max_size=30),
    st.integers(1, 12),
    st.data(),
)
def test_free_room_in_pieces_is_joined_and_no_byte_is_lost(
    wanted: list[tuple[int, Placement, bool]], pages: int, data: st.DataObject
) -> None:
    """Slots that may move keep their contents wherever they are; the others keep their place."""
    arena = Arena(40 * 4096)
    slots = []
    for number, (size, placement, _) in enumerate(wanted):
        slot = arena.try_allocate(size * 4096, owner=str(number), placement=placement)
        if slot is not None:
            ctypes.memset(slot.address, number + 1, slot.nbytes)
            slots.append(slot)
    for slot in data.draw(st.lists(st.sampled_from(slots), unique=True)) if slots else []:
        slots.remove(slot)
        slot.free()
    movable = [slot for slot in slots if wanted[int(slot.owner)][2]]
    places = {slot.owner: slot.start for slot in slots if slot not in movable}
    free_bytes = arena.free_bytes
    joined = arena.join(pages * 4096, movable=movable)
    assert arena.free_bytes == free_bytes
    assert all(slot.start == places.get(slot.owner, slot.start) for slot in slots)
    for slot in slots:
        contents = bytes([int(slot.owner) + 1]) * slot.nbytes
        assert ctypes.string_at(slot.address, slot.nbytes) == contents
    assert (arena.stats().largest_free_bytes >= pages * 4096) == joined or not joined
    if len(movable) == len(slots):
        assert joined == (free_bytes >= pages * 4096)
    for slot in slots:
        slot.free()
    assert arena.stats().largest_free_bytes == arena.capacity_bytes


def test_a_slot_that_a_tensor_looks_at_is_not_moved() -> None:
    """The tensor would show other bytes."""
    arena = Arena(4 * 4096)
    slots = [arena.allocate(4096, owner=str(number)) for number in range(4)]
    seen = slots[1].tensors(RecordSpec("r", (TensorSpec("x", torch.uint8, (4096,)),)))
    slots[0].free()
    slots[2].free()
    assert not arena.join(2 * 4096, movable=slots[1:2])
    del seen
    assert arena.join(2 * 4096, movable=slots[1:2])


def test_in_debug_mode_free_memory_is_no_number() -> None:
    """New, freed and left behind by a move: whoever looks there too early or too late has NaN."""
    arena = Arena(4 * PAGE, poison=True)
    wide = record((torch.float32, (PAGE // 4,)))
    first, second, third, fourth = (arena.allocate(PAGE, owner="a") for _ in range(4))
    for number, slot in enumerate((first, second, third, fourth)):
        values = slot.tensors(wide)["t0"]
        assert bool(values.isnan().all())
        values.fill_(number)
    del values
    addresses = [slot.address for slot in (first, second, third, fourth)]
    first.free()
    third.free()
    freed = [(ctypes.c_float * 4).from_address(addresses[at])[0] for at in (0, 2)]
    assert all(value != value for value in freed)  # noqa: PLR0124 - only NaN is not itself
    assert arena.join(2 * PAGE, movable=[second])
    assert second.tensors(wide)["t0"][0] == 1
    joined = arena.allocate(2 * PAGE, owner="a")
    assert bool(joined.tensors(wide)["t0"].isnan().all())


def test_debug_mode_leaves_what_a_tensor_still_looks_at() -> None:
    """It is filled when the last tensor over it is gone."""
    arena = Arena(PAGE, poison=True)
    slot = arena.allocate(4, owner="a")
    spec = record((torch.float32, (1,)))
    kept = slot.tensors(spec)["t0"].fill_(7)
    slot.free()
    assert kept[0] == 7
    del kept
    assert bool(arena.allocate(4, owner="b").tensors(spec)["t0"].isnan().all())
