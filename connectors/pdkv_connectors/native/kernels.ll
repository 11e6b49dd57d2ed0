; Copies and sums of memory on the host, in LLVM's own language: `compiled.py` has them compiled for the CPU at hand.
;
; Names: `to` and `from` are addresses, `keys` the address of the keys of the words at `from` (hashing.word_keys, which
; lie as the words do, so that all three move on together). A *line* is 64 bytes, a cache line; a *row* is a run of
; bytes on both sides; a *granule*, what one sum stands for, has rows at equal distances; a *unit* has granules for
; each of several heads. What is constant for a caller (`copies`, `sums`, `checks`) is a flag, and gone once it is inlined.

!0 = !{i32 1} ; a store past the caches
!1 = distinct !{!1, !2}
!2 = !{!"llvm.loop.unroll.count", i32 4} ; four lines at once: the hash is not kept waiting, and short rows still gain

declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
declare i64 @llvm.umin.i64(i64, i64)
declare i64 @llvm.vector.reduce.add.v8i64(<8 x i64>)

; ---- The hash: (low + key_low) * (high + key_high) of each word, modulo 2**64.

define internal <8 x i64> @nh_of_line(<8 x i64> %words, ptr %keys) alwaysinline {
  %key = load <16 x i32>, ptr %keys, align 8
  %halves = bitcast <8 x i64> %words to <16 x i32>
  %mixed.halves = add <16 x i32> %halves, %key              ; 32 bits wide: no carry from one half to the other
  %mixed = bitcast <16 x i32> %mixed.halves to <8 x i64>
  %low = and <8 x i64> %mixed, splat (i64 4294967295)
  %high = lshr <8 x i64> %mixed, splat (i64 32)
  %product = mul <8 x i64> %low, %high
  ret <8 x i64> %product
}

define internal i64 @nh_of_word(i64 %word, ptr %keys) alwaysinline {
  %key = load <2 x i32>, ptr %keys, align 8
  %halves = bitcast i64 %word to <2 x i32>
  %mixed.halves = add <2 x i32> %halves, %key
  %mixed = bitcast <2 x i32> %mixed.halves to i64
  %low = and i64 %mixed, 4294967295
  %high = lshr i64 %mixed, 32
  %product = mul i64 %low, %high
  ret i64 %product
}

; ---- Runs of memory.

; `nbytes` is a multiple of 64, and so is `to` where it `streams`: writes past the caches, without reading first what is
; overwritten. No prefetch: the hardware's own is better. Returns the sum.
define internal i64 @lines(ptr %to, ptr %from, ptr %keys, i64 %nbytes,
                           i1 %copies, i1 %sums, i1 %streams) alwaysinline {
entry:
  %empty = icmp eq i64 %nbytes, 0
  br i1 %empty, label %exit, label %line
line:
  %at = phi i64 [ 0, %entry ], [ %next, %onwards ]
  %total = phi <8 x i64> [ zeroinitializer, %entry ], [ %total.next, %onwards ]
  %from.at = getelementptr i8, ptr %from, i64 %at
  %words = load <8 x i64>, ptr %from.at, align 1
  br i1 %copies, label %write, label %written
write:
  %to.at = getelementptr i8, ptr %to, i64 %at
  br i1 %streams, label %stream, label %store
stream:
  store <8 x i64> %words, ptr %to.at, align 64, !nontemporal !0
  br label %written
store:
  store <8 x i64> %words, ptr %to.at, align 1
  br label %written
written:
  br i1 %sums, label %sum, label %onwards
sum:
  %keys.at = getelementptr i8, ptr %keys, i64 %at
  %products = call <8 x i64> @nh_of_line(<8 x i64> %words, ptr %keys.at)
  %total.more = add <8 x i64> %total, %products
  br label %onwards
onwards:
  %total.next = phi <8 x i64> [ %total, %written ], [ %total.more, %sum ]
  %next = add i64 %at, 64
  %more = icmp ult i64 %next, %nbytes
  br i1 %more, label %line, label %exit, !llvm.loop !1
exit:
  %lanes = phi <8 x i64> [ zeroinitializer, %entry ], [ %total.next, %onwards ]
  %result = call i64 @llvm.vector.reduce.add.v8i64(<8 x i64> %lanes)
  ret i64 %result
}

; What is less than a line: `nbytes` is a multiple of 8. Returns the sum.
define internal i64 @words(ptr %to, ptr %from, ptr %keys, i64 %nbytes, i1 %copies) noinline {
entry:
  %empty = icmp eq i64 %nbytes, 0
  br i1 %empty, label %exit, label %word
word:
  %at = phi i64 [ 0, %entry ], [ %next, %onwards ]
  %total = phi i64 [ 0, %entry ], [ %total.next, %onwards ]
  %from.at = getelementptr i8, ptr %from, i64 %at
  %word.at = load i64, ptr %from.at, align 1
  br i1 %copies, label %write, label %onwards
write:
  %to.at = getelementptr i8, ptr %to, i64 %at
  store i64 %word.at, ptr %to.at, align 1
  br label %onwards
onwards:
  %keys.at = getelementptr i8, ptr %keys, i64 %at
  %product = call i64 @nh_of_word(i64 %word.at, ptr %keys.at)
  %total.next = add i64 %total, %product
  %next = add i64 %at, 8
  %more = icmp ult i64 %next, %nbytes
  br i1 %more, label %word, label %exit
exit:
  %result = phi i64 [ 0, %entry ], [ %total.next, %onwards ]
  ret i64 %result
}

; Bytes from `to` to the next line, or the whole of `nbytes` where that is less.
define internal i64 @bytes_before_a_line(ptr %to, i64 %nbytes) alwaysinline {
  %address = ptrtoint ptr %to to i64
  %minus = sub i64 0, %address
  %distance = and i64 %minus, 63
  %result = call i64 @llvm.umin.i64(i64 %distance, i64 %nbytes)
  ret i64 %result
}

define internal void @copy_row(ptr %to, ptr %from, i64 %nbytes, i1 %streams) alwaysinline {
entry:
  br i1 %streams, label %stream, label %store
store:
  call void @llvm.memcpy.p0.p0.i64(ptr %to, ptr %from, i64 %nbytes, i1 false)
  ret void
stream:
  %first = call i64 @bytes_before_a_line(ptr %to, i64 %nbytes)
  call void @llvm.memcpy.p0.p0.i64(ptr %to, ptr %from, i64 %first, i1 false)
  %rest = sub i64 %nbytes, %first
  %body = and i64 %rest, -64
  %to.body = getelementptr i8, ptr %to, i64 %first
  %from.body = getelementptr i8, ptr %from, i64 %first
  %unused = call i64 @lines(ptr %to.body, ptr %from.body, ptr null, i64 %body, i1 true, i1 false, i1 true)
  %to.tail = getelementptr i8, ptr %to.body, i64 %body
  %from.tail = getelementptr i8, ptr %from.body, i64 %body
  %tail = and i64 %rest, 63
  call void @llvm.memcpy.p0.p0.i64(ptr %to.tail, ptr %from.tail, i64 %tail, i1 false)
  ret void
}

; `nbytes` is a multiple of 8. A `to` that is none takes ordinary stores, since no line begins between two words of it.
define internal i64 @sum_row(ptr %to, ptr %from, ptr %keys, i64 %nbytes, i1 %copies, i1 %streams) alwaysinline {
entry:
  %address = ptrtoint ptr %to to i64
  %off = and i64 %address, 7
  %aligned = icmp eq i64 %off, 0
  %may.stream = and i1 %aligned, %streams
  br i1 %may.stream, label %stream, label %store
stream:
  %head = call i64 @bytes_before_a_line(ptr %to, i64 %nbytes)
  %sum.head = call i64 @words(ptr %to, ptr %from, ptr %keys, i64 %head, i1 %copies)
  %rest = sub i64 %nbytes, %head
  %body = and i64 %rest, -64
  %to.body = getelementptr i8, ptr %to, i64 %head
  %from.body = getelementptr i8, ptr %from, i64 %head
  %keys.body = getelementptr i8, ptr %keys, i64 %head
  %sum.body = call i64 @lines(ptr %to.body, ptr %from.body, ptr %keys.body, i64 %body, i1 %copies, i1 true, i1 true)
  %sum.streamed = add i64 %sum.head, %sum.body
  %streamed = add i64 %head, %body
  br label %tail
store:
  %whole = and i64 %nbytes, -64
  %sum.stored = call i64 @lines(ptr %to, ptr %from, ptr %keys, i64 %whole, i1 %copies, i1 true, i1 false)
  br label %tail
tail:
  %done = phi i64 [ %streamed, %stream ], [ %whole, %store ]
  %sum = phi i64 [ %sum.streamed, %stream ], [ %sum.stored, %store ]
  %left = sub i64 %nbytes, %done
  %to.tail = getelementptr i8, ptr %to, i64 %done
  %from.tail = getelementptr i8, ptr %from, i64 %done
  %keys.tail = getelementptr i8, ptr %keys, i64 %done
  %sum.tail = call i64 @words(ptr %to.tail, ptr %from.tail, ptr %keys.tail, i64 %left, i1 %copies)
  %result = add i64 %sum, %sum.tail
  ret i64 %result
}

; ---- Units. Their shape is an array of 64-bit numbers, equal for all units of a call; strides in bytes:

%shape = type { i64,  ;  0 heads
                i64,  ;  1 from one head to the next, at `from`
                i64,  ;  2 the same at `to`
                i64,  ;  3 the same in the table of sums
                i64,  ;  4 granules of each head
                i64,  ;  5 from one granule to the next, at `from`
                i64,  ;  6 the same at `to`
                i64,  ;  7 rows of a granule
                i64,  ;  8 from one row to the next, at `from`
                i64,  ;  9 the same at `to`
                i64 } ; 10 bytes of a row

; Returns the sum.
define internal i64 @granule(ptr %to, ptr %from, ptr %keys, ptr %shape,
                             i1 %copies, i1 %sums, i1 %streams) alwaysinline {
entry:
  %rows.at = getelementptr %shape, ptr %shape, i64 0, i32 7
  %from.stride.at = getelementptr %shape, ptr %shape, i64 0, i32 8
  %to.stride.at = getelementptr %shape, ptr %shape, i64 0, i32 9
  %nbytes.at = getelementptr %shape, ptr %shape, i64 0, i32 10
  %rows = load i64, ptr %rows.at
  %from.stride = load i64, ptr %from.stride.at
  %to.stride = load i64, ptr %to.stride.at
  %nbytes = load i64, ptr %nbytes.at
  br label %row
row:
  %number = phi i64 [ 0, %entry ], [ %next, %onwards ]
  %total = phi i64 [ 0, %entry ], [ %total.next, %onwards ]
  %from.offset = mul i64 %number, %from.stride
  %to.offset = mul i64 %number, %to.stride
  %from.row = getelementptr i8, ptr %from, i64 %from.offset
  %to.row = getelementptr i8, ptr %to, i64 %to.offset
  br i1 %sums, label %sum, label %copy
sum:
  %keys.row = getelementptr i8, ptr %keys, i64 %from.offset
  %product = call i64 @sum_row(ptr %to.row, ptr %from.row, ptr %keys.row, i64 %nbytes, i1 %copies, i1 %streams)
  br label %onwards
copy:
  call void @copy_row(ptr %to.row, ptr %from.row, i64 %nbytes, i1 %streams)
  br label %onwards
onwards:
  %more.sum = phi i64 [ %product, %sum ], [ 0, %copy ]
  %total.next = add i64 %total, %more.sum
  %next = add i64 %number, 1
  %more = icmp ult i64 %next, %rows
  br i1 %more, label %row, label %exit
exit:
  ret i64 %total.next
}

; Whether it is right: false where it `checks`, and a sum is not the one in the table. Where it does not, it writes them.
define internal i1 @unit(ptr %to, ptr %from, ptr %keys, ptr %table, ptr %shape,
                         i1 %copies, i1 %sums, i1 %checks, i1 %streams) alwaysinline {
entry:
  %heads.at = getelementptr %shape, ptr %shape, i64 0, i32 0
  %from.head.at = getelementptr %shape, ptr %shape, i64 0, i32 1
  %to.head.at = getelementptr %shape, ptr %shape, i64 0, i32 2
  %table.head.at = getelementptr %shape, ptr %shape, i64 0, i32 3
  %granules.at = getelementptr %shape, ptr %shape, i64 0, i32 4
  %from.granule.at = getelementptr %shape, ptr %shape, i64 0, i32 5
  %to.granule.at = getelementptr %shape, ptr %shape, i64 0, i32 6
  %heads = load i64, ptr %heads.at
  %from.head = load i64, ptr %from.head.at
  %to.head = load i64, ptr %to.head.at
  %table.head = load i64, ptr %table.head.at
  %granules = load i64, ptr %granules.at
  %from.granule = load i64, ptr %from.granule.at
  %to.granule = load i64, ptr %to.granule.at
  br label %head
head:
  %head.number = phi i64 [ 0, %entry ], [ %head.next, %head.done ]
  %head.right = phi i1 [ true, %entry ], [ %right.next, %head.done ]
  %from.head.offset = mul i64 %head.number, %from.head
  %to.head.offset = mul i64 %head.number, %to.head
  %table.head.offset = mul i64 %head.number, %table.head
  br label %each
each:
  %number = phi i64 [ 0, %head ], [ %next, %onwards ]
  %right = phi i1 [ %head.right, %head ], [ %right.next, %onwards ]
  %from.granule.offset = mul i64 %number, %from.granule
  %to.granule.offset = mul i64 %number, %to.granule
  %from.offset = add i64 %from.head.offset, %from.granule.offset
  %to.offset = add i64 %to.head.offset, %to.granule.offset
  %from.here = getelementptr i8, ptr %from, i64 %from.offset
  %to.here = getelementptr i8, ptr %to, i64 %to.offset
  %keys.here = getelementptr i8, ptr %keys, i64 %from.offset
  %sum = call i64 @granule(ptr %to.here, ptr %from.here, ptr %keys.here, ptr %shape,
                           i1 %copies, i1 %sums, i1 %streams)
  br i1 %sums, label %summed, label %onwards
summed:
  %place.offset = mul i64 %number, 8
  %table.offset = add i64 %table.head.offset, %place.offset
  %place = getelementptr i8, ptr %table, i64 %table.offset
  br i1 %checks, label %check, label %note
check:
  %expected = load i64, ptr %place, align 1
  %equal = icmp eq i64 %expected, %sum
  %right.checked = and i1 %right, %equal
  br label %onwards
note:
  store i64 %sum, ptr %place, align 1
  br label %onwards
onwards:
  %right.next = phi i1 [ %right, %each ], [ %right.checked, %check ], [ %right, %note ]
  %next = add i64 %number, 1
  %more = icmp ult i64 %next, %granules
  br i1 %more, label %each, label %head.done
head.done:
  %head.next = add i64 %head.number, 1
  %more.heads = icmp ult i64 %head.next, %heads
  br i1 %more.heads, label %head, label %exit
exit:
  ret i1 %right.next
}

; The place of the first unit that is not right, after which nothing is done; `count` where all are.
; `tos`, `froms`, `keyses` and `tables` are arrays of `count` addresses.
define internal i64 @units(ptr %tos, ptr %froms, ptr %keyses, ptr %tables, i64 %count, ptr %shape,
                           i1 %copies, i1 %sums, i1 %checks, i1 %streams) alwaysinline {
entry:
  br label %check
check:
  %number = phi i64 [ 0, %entry ], [ %next, %onwards ]
  %more = icmp ult i64 %number, %count
  br i1 %more, label %one, label %exit
one:
  %to.at = getelementptr ptr, ptr %tos, i64 %number
  %from.at = getelementptr ptr, ptr %froms, i64 %number
  %to = load ptr, ptr %to.at
  %from = load ptr, ptr %from.at
  br i1 %sums, label %sum, label %copy
sum:
  %keys.at = getelementptr ptr, ptr %keyses, i64 %number
  %table.at = getelementptr ptr, ptr %tables, i64 %number
  %keys = load ptr, ptr %keys.at
  %table = load ptr, ptr %table.at
  %right = call i1 @unit(ptr %to, ptr %from, ptr %keys, ptr %table, ptr %shape,
                         i1 %copies, i1 true, i1 %checks, i1 %streams)
  br i1 %right, label %onwards, label %exit
copy:
  %unused = call i1 @unit(ptr %to, ptr %from, ptr null, ptr null, ptr %shape, i1 %copies, i1 false, i1 false, i1 %streams)
  br label %onwards
onwards:
  %next = add i64 %number, 1
  br label %check
exit:
  fence seq_cst ; streamed stores are seen by nobody in order before it
  ret i64 %number
}

; ---- What is called from outside. `streams` is 0 or 1.

define void @copy_runs(ptr %tos, ptr %froms, ptr %sizes, i64 %count, i64 %streams) {
entry:
  %streams.flag = trunc i64 %streams to i1
  br label %check
check:
  %number = phi i64 [ 0, %entry ], [ %next, %run ]
  %more = icmp ult i64 %number, %count
  br i1 %more, label %run, label %exit
run:
  %to.at = getelementptr ptr, ptr %tos, i64 %number
  %from.at = getelementptr ptr, ptr %froms, i64 %number
  %size.at = getelementptr i64, ptr %sizes, i64 %number
  %to = load ptr, ptr %to.at
  %from = load ptr, ptr %from.at
  %size = load i64, ptr %size.at
  call void @copy_row(ptr %to, ptr %from, i64 %size, i1 %streams.flag)
  %next = add i64 %number, 1
  br label %check
exit:
  fence seq_cst
  ret void
}

define void @copy_units(ptr %tos, ptr %froms, i64 %count, ptr %shape, i64 %streams) {
  %flag = trunc i64 %streams to i1
  %unused = call i64 @units(ptr %tos, ptr %froms, ptr null, ptr null, i64 %count, ptr %shape,
                            i1 true, i1 false, i1 false, i1 %flag)
  ret void
}

define i64 @copy_and_check_units(ptr %tos, ptr %froms, ptr %keyses, ptr %tables, i64 %count, ptr %shape, i64 %streams) {
  %flag = trunc i64 %streams to i1
  %result = call i64 @units(ptr %tos, ptr %froms, ptr %keyses, ptr %tables, i64 %count, ptr %shape,
                            i1 true, i1 true, i1 true, i1 %flag)
  ret i64 %result
}

define void @sum_units(ptr %froms, ptr %keyses, ptr %tables, i64 %count, ptr %shape) {
  %unused = call i64 @units(ptr %froms, ptr %froms, ptr %keyses, ptr %tables, i64 %count, ptr %shape,
                            i1 false, i1 true, i1 false, i1 false)
  ret void
}
