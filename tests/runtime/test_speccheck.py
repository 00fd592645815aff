"""Every spec that graphio makes passes, and no spec that differs from it in one place does."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftc.runtime.errors import UsageError
from draftc.runtime.graphio import Dim, GraphSpec, TensorSpec
from draftc.runtime.speccheck import check_spec

layer = st.tuples(st.integers(1, 8), st.integers(1, 128), st.integers(1, 128))
specs = st.builds(
    GraphSpec.decoder,
    st.lists(layer, min_size=1, max_size=4),
    st.just(288),
    st.integers(1, 2**31 - 1),
    st.sampled_from(["float32", "float16", "bfloat16"]),
)


@given(spec=specs, seed=st.integers())
def test_specs_of_graphio_pass_in_any_order(spec: GraphSpec, seed: int) -> None:
    mixed = random.Random(seed)
    inputs, outputs = list(spec.inputs), list(spec.outputs)
    mixed.shuffle(inputs)
    mixed.shuffle(outputs)
    check_spec(GraphSpec(tuple(inputs), tuple(outputs)), "spec", 288)


def altered(tensor: TensorSpec, data: st.DataObject) -> TensorSpec:
    part = data.draw(st.sampled_from(["name", "dtype", "rank", "dim"]))
    if part == "name":
        return replace(tensor, name=tensor.name + "0")
    if part == "dtype":
        dtypes = {"float32", "float16", "bfloat16", "int64", "bool"} - {tensor.dtype}
        return replace(tensor, dtype=data.draw(st.sampled_from(sorted(dtypes))))
    if part == "rank":
        return replace(tensor, shape=data.draw(st.sampled_from([(), tensor.shape[:-1], (*tensor.shape, 1)])))
    axis = data.draw(st.integers(0, len(tensor.shape) - 1))
    free: list[Dim] = [0, -1, 2**31, "D"]  # no extent that any axis may have
    shape = (*tensor.shape[:axis], data.draw(st.sampled_from(free)), *tensor.shape[axis + 1 :])
    return replace(tensor, shape=shape)


@given(spec=specs, data=st.data())
def test_one_difference_is_refused_in_one_line(spec: GraphSpec, data: st.DataObject) -> None:
    side = data.draw(st.sampled_from(["inputs", "outputs"]))
    tensors: list[TensorSpec] = list(getattr(spec, side))
    index = data.draw(st.integers(0, len(tensors) - 1))
    kind = data.draw(st.sampled_from(["alter", "remove", "repeat"]))
    if kind == "alter":
        tensors[index] = altered(tensors[index], data)
    elif kind == "remove":
        del tensors[index]
    else:
        tensors.append(tensors[index])
    with pytest.raises(UsageError, match=r"^target\.spec\.(inputs|outputs)(\[\d+\])?: ") as caught:
        check_spec(replace(spec, **{side: tuple(tensors)}), "target.spec", 288)
    assert "\n" not in str(caught.value)


@given(spec=specs, length=st.integers(1, 2**31 - 1).filter(lambda length: length != 288))
def test_another_buffer_length_is_refused(spec: GraphSpec, length: int) -> None:
    with pytest.raises(UsageError, match=r"must have shape"):
        check_spec(spec, "spec", length)
