"""Attention in other spellings than a call, and calls over heads that were merged with sequences, as one call each.

The way: `recognise` finds them, `scores` follows what is done to scores, `rewrite` puts the operator in their place;
`factors` knows which dimensions are which.
"""
