"""Secure sum: a server learns the sum of vectors of its clients, and of each single vector nothing but noise.

Source: Bonawitz, Ivanov, Kreuter, Marcedone, McMahan, Patel, Ramage, Segal, Seth, "Practical Secure Aggregation for
Privacy-Preserving Machine Learning", CCS 2017, protocol of Figure 4 with both masks, for a server that is honest but
curious. Per round: (0) each client sends two public keys and the hash of its own mask's seed; (1) with everybody's keys
it sends encrypted shares of its mask key and of that seed; (2) it sends its vector plus its own mask plus or minus one
mask for each client that has sent shares; (3) knowing who has delivered, it reveals one share for each client: of the
own mask of those who have, of the mask key of those who have not. So the masks of all can be removed from the sum, and
from no single vector: the own mask protects a vector that arrives late, after its client's mask key was given up.

What is protected: a vector, against a server that follows the protocol and up to ``t - 1`` clients that tell it all
they know, with ``t`` of ``n`` shares needed. A server that names different clients as delivered to different clients
does not get further, as long as fewer than ``2 t - n`` clients help it: each answers once in a round, and ``2 t > n``.
What is not: a server that makes up clients (nobody but it vouches for public keys), a sum of which all other terms are
known, wrong vectors, and who takes part. A server that stops after phase 2 learns nothing.

Differs: the hash of phase 0 is not in the paper; wrong shares of a seed are found by it. Shares are of 32-byte secrets
in the field of 2^521 - 1. Numbers are fixed-point, see `FixedPoint`.

Read in this order: `fixed_point` and `tensors` (an update as integers), `keys` (secrets, shares and masks), `device`
and `server` (the two halves of the protocol).
"""
