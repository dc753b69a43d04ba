"""Rewrite attention that a model writes out, or calls over heads merged with sequences, as calls over `[B, H, S, D]`.

`recognise` finds the products and softmaxes, `scores` follows the operators on scores, `factors` tracks dimensions,
`distances` extracts the slopes of biases such as ALiBi's, `profiles` learned biases by query and distance,
`bias_tables` others by distance, such as T5's, and `rewrite` replaces the nodes by the attention operator.
"""
