"""The paper on a model of one's own: every part of it in one command, and one page that reads in its order.

`scale` says how much is done, `parts` which parts there are and which of our functions each calls, `plan` what they will
take, `run` runs what is left and goes on after a part that fails, `claims` what the numbers say about the paper's, and
`page` puts them beside each other. Nothing is computed here that another command does not compute.
"""
