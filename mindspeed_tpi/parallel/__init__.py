"""How work is spread over ranks, and the only code in which partial sums cross them."""
