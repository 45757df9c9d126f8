"""What is read in a program's text: sizes, how often a permute runs, and what stands between its start and its end."""

import pytest

from tools import hlo
from tools.hlo import Permute

# A ring of 8: four trips of a loop whose permute starts before the inner loop's product and ends after it, then one
# that starts after all loops. A constant limit, one in the loop's state, and one that XLA has written down.
RING = """
HloModule jit_ring, is_scheduled=true, entry_computation_layout={(bf16[1,64,2,16]{3,1,2,0:T(8,128)(2,1)})->f32[]}

%fused_product (p.0: bf16[64,16], p.1: bf16[64,16]) -> f32[64,64] {
  %p.0 = bf16[64,16]{1,0:T(8,128)(2,1)} parameter(0)
  %p.1 = bf16[64,16]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %dot.1 = f32[64,64]{1,0:T(8,128)} convolution(%p.0, %p.1), dim_labels=bf_oi->bf, metadata={op_name="a/dot"}
}

%inner_body (state.1: (s32[], bf16[64,16])) -> (s32[], bf16[64,16]) {
  %state.1 = (s32[]{:T(128)}, bf16[64,16]{1,0}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  %x.1 = bf16[64,16]{1,0} get-tuple-element(%state.1), index=1
  %scores = f32[64,64]{1,0:T(8,128)} fusion(%x.1, %x.1), kind=kOutput, calls=%fused_product
  ROOT %tuple.1 = (s32[]{:T(128)}, bf16[64,16]{1,0}) tuple(%i.1, %x.1)
}

%inner_condition (state.2: (s32[], bf16[64,16])) -> pred[] {
  %state.2 = (s32[]{:T(128)}, bf16[64,16]{1,0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

%outer_body (state.3: (s32[], bf16[64,16], s32[])) -> (s32[], bf16[64,16], s32[]) {
  %state.3 = (s32[]{:T(128)}, bf16[64,16]{1,0}, s32[]) parameter(0)
  %i.3 = s32[]{:T(128)} get-tuple-element(%state.3), index=0
  %x.3 = bf16[64,16]{1,0:T(8,128)(2,1)} get-tuple-element(%state.3), index=1
  %n.3 = s32[] get-tuple-element(%state.3), index=2
  %start = (bf16[64,16]{1,0:T(8,128)(2,1)}, bf16[64,16]{1,0}, u32[]{:S(2)}) collective-permute-start(%x.3), channel_id=1
  %inner = (s32[]{:T(128)}, bf16[64,16]{1,0}) while(%state.3), condition=%inner_condition, body=%inner_body
  %done = bf16[64,16]{1,0:T(8,128)(2,1)} collective-permute-done(%start), metadata={op_name="ppermute"}
  ROOT %tuple.3 = (s32[]{:T(128)}, bf16[64,16]{1,0}, s32[]) tuple(%i.3, %done, %n.3)
}

%outer_condition (state.4: (s32[], bf16[64,16], s32[])) -> pred[] {
  %limit = s32[]{:T(128)} constant(7)
  %state.4 = (s32[]{:T(128)}, bf16[64,16]{1,0}, s32[]) parameter(0)
  %i.4 = s32[]{:T(128)} get-tuple-element(%state.4), index=0
  %n.4 = s32[] get-tuple-element(%state.4), index=2
  ROOT %less = pred[]{:T(512)} compare(%i.4, %limit), direction=LT, metadata={op_name="while/cond/lt"}
}

ENTRY %main (p: bf16[64,16]) -> bf16[64,16] {
  %p = bf16[64,16]{1,0:T(8,128)(2,1)} parameter(0)
  %three = s32[]{:T(128)} constant(3)
  %first = s32[]{:T(128)} copy(%three)
  %nine = s32[] constant(9)
  %begin = (s32[]{:T(128)}, bf16[64,16]{1,0}, s32[]) tuple(%first, %p, /*index=2*/%nine)
  %outer = (s32[]{:T(128)}, bf16[64,16]{1,0}, s32[]) while(%begin), condition=%outer_condition, body=%outer_body
  %x = bf16[64,16]{1,0:T(8,128)(2,1)} get-tuple-element(%outer), index=1
  %start.1 = ((bf16[64,16]{1,0}, bf16[64,16]{1,0})) collective-permute-start(%x, %x), channel_id=2
  %mask = pred[64,64]{1,0} fusion(%x), kind=kLoop, calls=%inner_condition
  ROOT %done.1 = (f32[64,16]{1,0}, f32[64,16]{1,0}) collective-permute-done(%start.1)
}
"""
HIDDEN = Permute(arrays=1, bytes=64 * 16 * 2, times=4, behind=("loop",))
ALONE = Permute(arrays=2, bytes=2 * 64 * 16 * 4, times=1)


def test_a_permute_around_a_loop_is_hidden_and_one_after_all_loops_is_not():
    assert hlo.permutes(RING) == [HIDDEN, ALONE]
    assert hlo.collectives(RING)["collective-permute"] == 2 and hlo.collectives(RING)["all-gather"] == 0


LOOP = "  %inner = (s32[]{:T(128)}, bf16[64,16]{1,0}) while(%state.3), condition=%inner_condition, body=%inner_body\n"
MASK = "  %mask = pred[64,64]{1,0} fusion(%x), kind=kLoop, calls=%inner_condition\n"
CALL = '%k = f32[8] custom-call(%x), custom_call_target="{}", backend_config="calls"\n  '


@pytest.mark.parametrize(
    "old, new, expected",
    [
        (LOOP, "", [()]),
        ("kind=kOutput, calls=%fused_product", "kind=kLoop, calls=%inner_condition", [()]),
        (MASK, MASK.replace("inner_condition", "fused_product"), [("loop",), ("product",)]),
        (MASK, MASK.replace("fusion", "call").replace("calls", "to_apply").replace("inner_condition", "inner_body"),
         [("loop",), ("product",)]),
        (MASK, "  %c = f32[] conditional(%x), branch_computations={%inner_condition, %inner_body}\n",
         [("loop",), ("branch",)]),
        ("%mask = ", CALL.format("tpu_custom_call") + "%mask = ", [("loop",), ("kernel",)]),
        ("%mask = ", CALL.format("__cublas$gemm") + "%mask = ", [("loop",), ("product",)]),
        ("%mask = ", CALL.format("ResizeNearest") + "%mask = ", [("loop",), ()]),
    ],
    ids=["no loop", "an idle loop", "a product", "a call", "a branch", "a kernel", "cuBLAS", "another call"],
)  # fmt: skip
def test_only_what_computes_hides_a_permute(old, new, expected):
    assert RING.count(old) == 1
    behind = [one.behind for one in hlo.permutes(RING.replace(old, new))]
    assert behind == expected + [()] * (2 - len(expected))


CONDITION = "compare(%i.4, %limit), direction=LT"
WHILE = "condition=%outer_condition, body=%outer_body"


@pytest.mark.parametrize("old, new, trips", [
    ("constant(7)", "constant(3)", 0),
    ("compare(%i.4, %limit)", "compare(%i.4, %n.4)", 6),  # the limit is in the loop's state
    (WHILE, WHILE + ', backend_config={"known_trip_count":{"n":"11"},"known_init_step":{"init":"0"}}', 11),
    (CONDITION, "compare(%i.4, %limit), direction=NE", None),
    ("s32[]{:T(128)} constant(3)", "s32[]{:T(128)} parameter(1)", None),
    ("tuple(%first, %p,", "opt-barrier(%first, %p,", None),
])  # fmt: skip
def test_the_trips_of_a_loop(old, new, trips):
    assert RING.count(old) == 1
    assert [one.times for one in hlo.permutes(RING.replace(old, new))] == [trips, 1]


def test_loops_in_loops_and_two_calls_multiply_and_add():
    twice = RING.replace(LOOP, LOOP + LOOP.replace("%inner ", "%again "))
    inside = '%inner_body, backend_config={"known_trip_count":{"n":"5"}}\n'
    times = hlo.executions(hlo.computations(twice.replace("%inner_body\n", inside)))
    assert (times["main"], times["outer_body"], times["inner_body"], times["fused_product"]) == (1, 4, 40, 40)
    assert hlo.executions(hlo.computations(RING))["inner_body"] is None
    assert [one.times for one in hlo.permutes(RING.replace(WHILE, WHILE.replace("outer_body", "inner_body")))] == [0, 1]


def test_a_permute_that_is_not_split_travels_alone():
    text = RING.replace("collective-permute-start(%x.3)", "copy(%x.3)")
    text = text.replace("collective-permute-done(%start)", "collective-permute(%start)")
    assert hlo.permutes(text) == [Permute(1, 64 * 16 * 2, 4), ALONE]


@pytest.mark.parametrize("kind, expected", [
    ("bf16[1,64,2,16]{3,1,2,0:T(8,128)(2,1)}", (1, 4096)),
    ("(f32[8]{0}, pred[3,3], f8e4m3fn[16], /*index=3*/u32[]{:S(2)})", (4, 32 + 9 + 16 + 4)),
    ("s4[10]", (1, 5)),
    ("()", (0, 0)),
])  # fmt: skip
def test_bytes_of_a_type(kind, expected):
    assert hlo.size(kind) == expected


def test_the_longest_axis_that_an_all_gather_makes():
    text = """
ENTRY main {
  one = bf16[4,11008]{1,0} all-gather(x), dimensions={1}
  start = (f32[2,64]{1,0}, f32[2,512]{1,0}) all-gather-start(y), dimensions={1}
  done = f32[2,512]{1,0} all-gather-done(start)
  other = f32[99999]{0} all-reduce(z)
}"""
    assert hlo.longest_gathered(text) == 11008
    assert hlo.longest_gathered(text.replace("11008", "8")) == 512
    assert hlo.longest_gathered("  other = f32[9]{0} all-reduce(z)") == 0
