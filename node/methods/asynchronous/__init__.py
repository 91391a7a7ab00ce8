"""Asynchronous outer methods: a round takes the peers that are ready (FedBuff, delayed Nesterov)."""
