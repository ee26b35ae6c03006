"""Hand-made mistakes in the core, each with the tests that should notice it."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """One text in one file, replaced."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


SUMS = ("tests/zcomm/test_collectives.py",)
EXACT = ("tests/zero/test_exactness.py",)
CLIP = ("tests/zero/test_precision.py", "tests/zero/test_exactness.py")
RESIDUAL = ("tests/zcomm/test_residual.py",)
KERNELS = ("tests/zcomm/test_kernels.py",)
SAVED = ("tests/zero/test_checkpoint.py", "tests/zero/test_checkpoint_failures.py")
QUANT, RS, AR = "zcomm/quant.py", "zcomm/reduce_scatter.py", "zcomm/all_reduce.py"

MUTANTS = [
    Mutant("dropped divide, one hop", RS, "kernels.decode_sum(received, layout, output, 0, divisor)",
           "kernels.decode_sum(received, layout, output, 0, 1)", SUMS),
    Mutant("dropped divide, two hops", RS, "kernels.decode_sum(received, between, output, 0, divisor)",
           "kernels.decode_sum(received, between, output, 0, 1)", SUMS),
    Mutant("dropped divide, reference kernels", QUANT, "    if divisor != 1:\n        total = divided(total, divisor)\n",
           "", KERNELS),
    Mutant("wrong hop order", RS, "(intra, wire), (inter, wire_between) = route.hops",
           "(inter, wire), (intra, wire_between) = route.hops", SUMS),
    Mutant("swapped formats of the hops", RS, "(intra, wire), (inter, wire_between) = route.hops",
           "(intra, wire_between), (inter, wire) = route.hops", SUMS),
    Mutant("swapped rank order of rows", RS, "strides = route.strides(numbering, rows.stride(0))",
           "strides = route.strides(numbering, rows.stride(0))[::-1]", SUMS),
    Mutant("chunks after the first are dropped", RS, "return pipelined(of_chunks, num_exchanges=2)",
           "return pipelined(of_chunks[:1], num_exchanges=2)", ("tests/zcomm/test_chunks.py",)),
    Mutant("random numbers of a chunk start anew", RS, "encoder.at(c.start)) for c in chunks",
           "encoder.at(0)) for c in chunks", ("tests/zcomm/test_random.py", "tests/zcomm/test_chunks.py")),
    Mutant("gradients are summed, not averaged", "zero/reduction.py", '                "avg",\n', '                "sum",\n', EXACT),
    Mutant("wrong shard numbering of gradients", "zero/reduction.py", 'numbering="local",\n                async_op',
           'numbering="rank",\n                async_op', EXACT),
    Mutant("dropped works: a missing wait", "zero/reduction.py", "                works.append(work)\n",
           "                pass\n", ("tests/zero/test_exactness.py", "tests/zero/test_poison.py")),
    Mutant("residual never counts", "zero/reduction.py", "grads.in_node.residual.commit()", "pass",
           ("tests/zero/test_delta_hpz.py", "tests/zero/test_delta_hpz_state.py")),
    Mutant("node sums are not cleared when a step is skipped", "zero/reduction.py", "        grads.in_node.clear()\n", "",
           ("tests/zero/test_delta_hpz.py", "tests/zero/test_retried_steps.py")),
    Mutant("skipped residual", "zcomm/residual.py", "        values.add_(residual)\n", "", RESIDUAL),
    Mutant("residual of the sum, not of the difference", "zcomm/residual.py", "encode(values.sub_(decoded), first)",
           "encode(values, first)", RESIDUAL),
    Mutant("rollback keeps what it should forget", "zcomm/residual.py",
           "                self._works.pop().wait()\n        self._next = None", "                self._works.pop().wait()",
           RESIDUAL),
    Mutant("damping is ignored", "zcomm/residual.py", "        if self.beta != 1:\n", "        if self.beta > 1:\n",
           ("tests/zcomm/test_residual.py", "tests/zcomm/test_install_damping.py")),
    Mutant("residual blocks that are not finite are overwritten", "zcomm/residual.py", "is_kept = scales.isnan()",
           "is_kept = torch.zeros_like(scales.isnan())", RESIDUAL),
    Mutant("off by one at a block edge", QUANT,
           "missing = layout.blocks_per_segment * layout.block - layout.segment_numel",
           "missing = layout.blocks_per_segment * layout.block - layout.segment_numel\n    values = values.roll(1, -1)",
           KERNELS),
    Mutant("swapped nibbles", QUANT, "(codes[..., 0::2] & 0xF) | (codes[..., 1::2] << 4)",
           "(codes[..., 1::2] & 0xF) | (codes[..., 0::2] << 4)", KERNELS),
    Mutant("the last block is rotated though it is short", QUANT,
           "num_whole = layout.segment_numel // layout.block", "num_whole = layout.blocks_per_segment", KERNELS),
    Mutant("no check of layout hashes", QUANT, "        if value != layout.hash:\n", "        if False:\n",
           ("tests/zcomm/test_bad_input.py", "tests/zcomm/test_kernels.py")),
    Mutant("the scale as a half", "zcomm/residual.py", "num_blocks].view(torch.bfloat16)", "num_blocks].view(torch.float16)", RESIDUAL),
    Mutant("skipped checksum of messages", "zcomm/message.py", "        if expected != found:\n", "        if False:\n",
           ("tests/zcomm/test_debug.py", "tests/zcomm/test_collectives.py", "tests/zcomm/test_bad_input.py")),
    Mutant("codes overlap the headers", "zcomm/message.py",
           "return _round_up(self.codec.header_nbytes * self.num_segments * self.blocks_per_segment, ALIGN)",
           "return _round_up(self.codec.header_nbytes * self.num_segments * self.blocks_per_segment, 2)", KERNELS),
    Mutant("all-reduce: padding is not zero", AR, "    rows.view(-1)[numel:].zero_()\n", "    rows.view(-1)[numel:].fill_(9)\n",
           ("tests/zcomm/test_collectives.py", "tests/zcomm/test_lengths.py")),
    Mutant("all-reduce: an uneven tensor is not written back", AR, "    if rows.data_ptr() != tensor.data_ptr():\n",
           "    if False:\n", ("tests/zcomm/test_collectives.py", "tests/zcomm/test_lengths.py")),
    Mutant("all-reduce sums in the narrow dtype", AR, "return torch.float64 if dtype == torch.float64 else torch.float32",
           "return dtype", SUMS),
    Mutant("stale secondary shard", "zcomm/secondary.py", 'is worthless."""\n        self.is_valid = False\n', 'is worthless."""\n',
           ("tests/zcomm/test_collectives.py", "tests/zcomm/test_groups.py", "tests/zero/test_exactness.py")),
    Mutant("secondary shard of the wrong rank", "zcomm/secondary.py",
           "        start = self._topology.local_rank * self._shard.numel()\n        part",
           "        start = (self._topology.ranks_per_node - 1 - self._topology.local_rank) * self._shard.numel()\n        part",
           ("tests/zcomm/test_collectives.py", "tests/zero/test_exactness.py")),
    Mutant("wrong clipping: the norm is not unscaled", "zero/clip.py", "return gradients.factor.scaled(total).to(dtype)",
           "return total.to(dtype)", CLIP),
    Mutant("wrong clipping: this rank's norm alone", "zero/clip.py",
           "by_rank = control.gather_beside(own.view(1), runtime.topology).view(-1)", "by_rank = own.view(1)", CLIP),
    Mutant("wrong clipping: no square root", "zero/clip.py", "sum_in_pairs(by_rank))).sqrt()", "sum_in_pairs(by_rank)))", CLIP),
    Mutant("missing overflow agreement", "zero/final_gradients.py",
           "self._overflow = control.any_(mine, self.runtime.topology)", "self._overflow = mine",
           ("tests/zero/test_nonfinite.py", "tests/zero/test_loss_scale.py")),
    Mutant("the factor is not applied", "zero/final_gradients.py", "            reducer.change(grads, self.factor.multiply_)\n",
           "            pass\n", CLIP),
    Mutant("gradients are not forgotten", "zero/final_gradients.py",
           "        for piece in self._pieces:\n            piece.master.grad = None\n", "", EXACT),
    Mutant("loss scale: window off by one", "zero/loss_scale.py", "        if self._num_good and self._num_good % self._window == 0:",
           "        if self._num_good and (self._num_good + 1) % self._window == 0:", ("tests/zero/test_loss_scale.py",)),
    Mutant("loss scale: hysteresis is not used up", "zero/loss_scale.py", "                self._hysteresis_left -= 1\n", "",
           ("tests/zero/test_loss_scale.py",)),
    Mutant("layout: a piece ends one early", "zero/layout.py", "min(slot.offset + slot.numel, high)\n",
           "min(slot.offset + slot.numel, high - 1)\n", ("tests/zero/test_layout.py",)),
    Mutant("layout: shards of different numbers", "zero/layout.py", "low, high = shard * self.shard_numel, (shard + 1) * self.shard_numel\n        for",
           "shard = self.world_size - 1 - shard\n        low, high = shard * self.shard_numel, (shard + 1) * self.shard_numel\n        for",
           ("tests/zero/test_layout.py",)),
    Mutant("checkpoint: skipped checksum of a chunk", "zero/checkpoints/storage.py",
           "    if chunk.crc32 is not None and zlib.crc32(data) != chunk.crc32:", "    if False:", SAVED[1:]),
    Mutant("checkpoint: skipped checksum of the metadata", "zero/checkpoints/index.py",
           '    if document.get("crc32") != _checksum(content):', "    if False:", SAVED[1:]),
    Mutant("checkpoint: latest before metadata.json", "zero/checkpoints/storage.py",
           "        self._check_visible(files)\n", "        replace_file(self._folder.parent / LATEST, latest_line(self._folder.name), self.save_id)\n        raise OSError\n",
           SAVED[1:]),
    Mutant("checkpoint: links are followed", "zero/checkpoints/folder.py", "    if path.is_symlink():\n", "    if False:\n",
           ("tests/security/test_untrusted_files.py",)),
    Mutant("checkpoint: the last chunk of a part is left out", "zero/checkpoints/planners.py",
           "        while start < stop:\n", "        while start < stop - 1:\n", SAVED[:1]),
]  # fmt: skip
