"""What wrong answers to several exercises of chapter 08 are made of."""



SPLIT_LENGTH = "split_length = tl.cdiv(length, splits)"


LAST = "last = tl.minimum(first + split_length, length)"


SCALE = "math.log2(math.e) / math.sqrt(head_dim)"


MERGED_LSE = "largest + tl.log(divisor)"


LOADED = 'lses = tl.load(lses_pointer + partial_rows, mask=present, other=float("-inf"))  # [BLOCK_S]'
