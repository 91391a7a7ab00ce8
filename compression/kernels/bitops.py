"""Processor instructions that numba does not expose: vector comparison, bit counts, prefetching."""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core.cgutils import ir
from numba.extending import intrinsic

WORD = 64
"""Number of values that `reaching` compares at once."""


@intrinsic  # type: ignore[untyped-decorator]
def reaching(typing_context: Any, bits: Any, first: Any, threshold: Any) -> Any:
    """reaching(bits, first, threshold): bit i is set if bits[first + i] reaches the threshold.

    Its sign is ignored. bits: float32 as contiguous uint32, with at least 64 elements from `first` on.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        lanes = ir.VectorType(ir.IntType(32), WORD)
        address = builder.bitcast(builder.gep(array.data, [arguments[1]]), lanes.as_pointer())
        one = builder.insert_element(ir.Constant(lanes, ir.Undefined), arguments[2], ir.Constant(ir.IntType(32), 0))
        every = ir.Constant(ir.VectorType(ir.IntType(32), WORD), [0] * WORD)
        threshold = builder.shuffle_vector(one, one, every)
        magnitudes = builder.and_(builder.load(address, align=4), ir.Constant(lanes, [0x7FFFFFFF] * WORD))
        return builder.bitcast(builder.icmp_unsigned(">=", magnitudes, threshold), ir.IntType(64))

    return types.uint64(bits, types.intp, types.uint32), codegen


@intrinsic  # type: ignore[untyped-decorator]
def ones(typing_context: Any, word: Any) -> Any:
    """Return the number of set bits of a uint64."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def lowest(typing_context: Any, word: Any) -> Any:
    """Return the position of the lowest set bit of a uint64, 64 if there is none."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """Prefetch the cache line of array[index]. Has no other effect, even if the index is out of range."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        address = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [address.type, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [address.type], kind)
        # Arguments: for reading; into the second-level cache, which allows far more outstanding requests than the
        # first; data.
        builder.call(function, [address, ir.Constant(number, 0), ir.Constant(number, 2), ir.Constant(number, 1)])
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen
