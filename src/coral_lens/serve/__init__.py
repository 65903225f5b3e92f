"""Lenses behind an API: one thread owns the model, requests wait in a bounded queue, and batches are made of what is there.

`server` runs the `app`, whose routes read and write one wire format each: `predict` (ours), `decisions` (OpenAI's) and
`systemone` (TypeSafe's). Each makes questions of a request; the `service` queues them, and the `worker` scores them with the
engine that `Lens.predict` has. `guard` stands before all of it: keys, hosts, sizes and headers.
"""
