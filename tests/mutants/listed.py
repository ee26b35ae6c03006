"""Hand-made mutants of the core, each with the tests that should catch it."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """A mutant: one text of one file, replaced."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    """A few fast tests that should catch it, the likeliest first."""
    hangs: bool = False
    """Whether the mutant hangs by nature: for others a timeout does not count."""


def _of(file: str, *names: str) -> tuple[str, ...]:
    return tuple(f"tests/{file}.py::{name}" for name in names)


def _exact(*cases: str) -> tuple[str, ...]:
    """A case of the test by name, ranks, ranks in a node and stage."""
    cases = tuple(case.replace(" 64 ", "-torch.float64-").replace(" ", "-") for case in cases)
    return _of("zero/test_exactness", *(f"test_equals_single_process[{case}]" for case in cases))


ONE_HOP = _of("zcomm/test_collectives", "test_reduce_scatter[torch-2-2-rank]", "test_reduce_scatter[torch-2-1-local]")
TWO_HOPS = _of("zcomm/test_collectives", "test_reduce_scatter[torch-4-2-rank]", "test_reduce_scatter[torch-4-2-local]")
ALL_REDUCE = _of(
    "zcomm/test_collectives", "test_all_reduce_and_all_to_all[torch-4-2]", "test_all_reduce_and_all_to_all[torch-3-3]"
)
SECONDARY = _of("zcomm/test_collectives", "test_secondary_partition")
KERNELS = _of(
    "zcomm/test_kernels", "test_golden_vectors", "test_reference_equals_the_contract", "test_native_equals_reference"
)
RESIDUAL = _of(
    "zcomm/test_residual",
    "test_residuals_are_what_the_contract_says[torch-4-2-rank]",
    "test_commit_and_rollback",
    "test_residuals_are_what_the_contract_says[torch-2-1-local]",
    "test_a_failed_exchange_is_rolled_back",
)
EXACT = _exact("plain 64 2-2-1", "plain 64 2-2-3")
SCALED = _of("zero/test_loss_scale", "test_norms_are_unscaled_and_an_overflow_of_one_shard_is_every_ranks[1]")
CLIP = _exact("clipping 64 2-2-1", "clipping 64 2-2-3")
DELTA_HPZ = _of("zero/test_delta_hpz", "test_replicas_and_residuals_are_the_oracles", "test_skipped_steps_and_writes")
SCALE = _of("zero/test_loss_scale", "test_first_doubling_and_halving", "test_trajectory_equals_the_rule")
LAYOUT = ("tests/zero/test_layout.py",)
DAMAGED = _of("zero/test_checkpoint_failures", "test_errors_are_named_the_same_on_all_ranks_and_change_nothing[1]")
RESUMED = _of("zero/test_checkpoint", "test_resuming_has_the_same_bits_as_not_stopping[1-WarmupDecayLR-True]")
LINKS = _of("security/test_untrusted_files", "test_a_checkpoint_has_no_links_and_no_pipes")
UNEVEN = "zcomm/_collectives/uneven_all_to_all.py"
CHANGES = "zcomm/_stateful/exact_changes.py"
PUBLISHER, SUBSCRIBER = "zero/_publish/publisher.py", "zero/_publish/subscriber.py"
EXACT_BITS = _of("zcomm/test_exact_changes", "test_replicas_have_the_bits_of_the_shards[4-2]")
PATCHED = _of("zero/test_publish_damage", "test_a_patch_with_one_damaged_chunk_changes_nothing")
IS_LINK = """\
    if path.is_symlink():
        raise CheckpointError(
            f"{path} is a symbolic link, which could lead to any file: copy the checkpoint with its files (cp -rL)"
        )
"""
OPENED = "    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC"
STREAMS = _of("zcomm/test_streams", "test_a_side_stream_starts_after_the_current_one_which_waits_in_the_end")
FLAGS = _of("zcomm/test_message_flags", "test_nothing_is_asked_in_a_capture_and_what_its_graph_finds_is_seen_later")
LAUNCHES = _of("zcomm/test_launches", "test_launches_of_each_collective")
PIPELINE, PLANS, ON_FLAGS = "cpp/nccl/pipeline.cc", "cpp/nccl/plans.cc", "zcomm/_kernels/message_flags.py"


def _checked(*checks: str) -> tuple[str, ...]:
    """A check on the fake device."""
    return tuple(f"cpp/tests/nccl_communicator_test.cc::{check}" for check in checks)


PUBLISHED = "        replace_file(self._folder / METADATA, data, self.save_id, check)\n"
POWER = _of("zero/test_checkpoint_power", "test_what_is_on_the_disk_when_the_power_fails_loads")
CONTENTS, TOGETHER = "zero/test_checkpoint_contents", "zero/test_checkpoint_agreement"
SAME = _of(TOGETHER, "test_ranks_load_the_same_checkpoint_or_none[2-1]")
TWO = _of(CONTENTS, "test_two_optimizers_do_not_share_a_tag")
RAISES = _of(TOGETHER, "test_an_object_that_raises_on_one_rank_stops_all_and_changes_nothing[1]")
QUANT, RS, AR = (
    "zcomm/_formats/reference.py",
    "zcomm/_collectives/reduce_scatter.py",
    "zcomm/_collectives/all_reduce.py",
)

MUTANTS = [
    Mutant("dropped divide, one hop", RS, "kernels.decode_sum(received, layout, output, 0, divisor)",
           "kernels.decode_sum(received, layout, output, 0, 1)", ONE_HOP),
    Mutant("dropped divide, two hops", RS, "kernels.decode_sum(last, between, output, 0, divisor / inside)",
           "kernels.decode_sum(last, between, output, 0, 1)", TWO_HOPS),
    Mutant("dropped divide, reference kernels", QUANT, "    if divisor != 1:\n        total = divided(total, divisor)\n",
           "", KERNELS),
    Mutant("wrong hop order", RS, "(intra, wire), (inter, wire_between) = route.hops",
           "(inter, wire), (intra, wire_between) = route.hops", TWO_HOPS),
    Mutant("swapped formats of the hops", RS, "(intra, wire), (inter, wire_between) = route.hops",
           "(intra, wire_between), (inter, wire) = route.hops", TWO_HOPS),
    Mutant("swapped rank order of rows", RS, "strides = route.strides(numbering, rows.stride(0))",
           "strides = route.strides(numbering, rows.stride(0))[::-1]", TWO_HOPS),
    Mutant("chunks after the first are dropped", RS, "return pipelined(of_chunks, num_exchanges=2)",
           "return pipelined(of_chunks[:1], num_exchanges=2)", _of("zcomm/test_chunks", "test_results_do_not_depend_on_chunks[torch-rank-float32]")),
    Mutant("random numbers of a chunk start anew", RS, "encoder.at(c.start)) for c in chunks",
           "encoder.at(0)) for c in chunks", _of("zcomm/test_random", "test_a_restart_and_chunks_have_the_same_bits[torch-rank]")),
    Mutant("gradients are summed, not averaged", "zero/_gradients/bucket_reduce_scatter.py", ' else "avg"\n', ' else "sum"\n', EXACT),
    Mutant("wrong shard numbering of gradients", "zero/_gradients/bucket_reduce_scatter.py", 'numbering="local",\n                    async_op',
           'numbering="rank",\n                    async_op', _exact("plain 64 4-2-1")),
    Mutant("dropped works: a missing wait", "zero/_gradients/bucket_reduce_scatter.py", "                works.append(work)\n",
           "                pass\n", _exact("plain 64 2-2-3", "plain 64 2-2-1") + _of("zero/test_poison", "test_training_reads_nothing_that_was_given_back")),
    Mutant("residual never counts", "zero/_modes/delta_hpz.py", "            residual.commit()", "            pass",
           DELTA_HPZ),
    Mutant("node sums are not cleared when a step is skipped", "zero/_modes/delta_hpz.py", "        sums.clear()\n", "",
           _of("zero/test_delta_hpz_state", "test_a_step_that_is_given_up_leaves_nothing_in_the_sums_of_a_node")),
    Mutant("skipped residual", "zcomm/_residuals/residual.py", "        values.add_(residual)\n", "", RESIDUAL),
    Mutant("residual of the sum, not of the difference", "zcomm/_residuals/residual.py", "encode(values.sub_(decoded), first, chosen)",
           "encode(values, first, chosen)", RESIDUAL),
    Mutant("rollback keeps what it should forget", "zcomm/_residuals/residual.py",
           "                self._works.pop().wait()\n        self._next = None", "                self._works.pop().wait()",
           RESIDUAL),
    Mutant("damping is ignored", "zcomm/_residuals/residual.py", "        if self.beta != 1:\n", "        if self.beta > 1:\n",
           RESIDUAL),
    Mutant("residual blocks that are not finite are overwritten", "zcomm/_residuals/residual.py", "is_kept = scales.isnan()",
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
           _of("zcomm/test_kernels", "test_another_layout_is_refused_before_anything_is_written")),
    Mutant("the scale as a half", "zcomm/_residuals/residual.py", "num_blocks].view(torch.bfloat16)", "num_blocks].view(torch.float16)", RESIDUAL),
    Mutant("skipped checksum of messages", "zcomm/_formats/message.py", "        if expected != found:\n", "        if False:\n",
           _of("zcomm/test_checked", "test_a_damaged_message_is_not_decoded")),
    Mutant("codes overlap the headers", "zcomm/_formats/message.py",
           "return _round_up(self.codec.header_nbytes * self.num_segments * self.blocks_per_segment, ALIGN)",
           "return _round_up(self.codec.header_nbytes * self.num_segments * self.blocks_per_segment, 2)", KERNELS),
    Mutant("all-reduce: padding is not zero", AR, "    rows.view(-1)[numel:].zero_()\n", "    rows.view(-1)[numel:].fill_(9)\n",
           ALL_REDUCE),
    Mutant("all-reduce: an uneven tensor is not written back", AR, "    if rows.data_ptr() != tensor.data_ptr():\n",
           "    if False:\n", ALL_REDUCE),
    Mutant("all-reduce sums in the narrow dtype", AR, "return torch.float64 if dtype == torch.float64 else torch.float32",
           "return dtype", ALL_REDUCE),
    Mutant("stale secondary shard", "zcomm/_stateful/secondary.py", 'is worthless."""\n        self.is_valid = False\n', 'is worthless."""\n',
           SECONDARY),
    Mutant("secondary shard of the wrong rank", "zcomm/_stateful/secondary.py",
           "        start = self._topology.local_rank * self._shard.numel()\n        part",
           "        start = (self._topology.ranks_per_node - 1 - self._topology.local_rank) * self._shard.numel()\n        part",
           SECONDARY),
    Mutant("wrong clipping: the norm is not unscaled", "zero/_step/clip.py", "return gradients.factor.scaled(total).to(dtype)",
           "return total.to(dtype)", SCALED),
    Mutant("wrong clipping: this rank's norm alone", "zero/_step/clip.py",
           "by_rank = control.gather_beside(own.view(1), runtime.topology).view(-1)", "by_rank = own.view(1)", CLIP),
    Mutant("wrong clipping: no square root", "zero/_step/clip.py", "sum_in_pairs(by_rank))).sqrt()", "sum_in_pairs(by_rank)))", CLIP),
    Mutant("missing overflow agreement", "zero/_step/final_gradients.py",
           "self._overflow = control.any_(mine, self.runtime.topology)", "self._overflow = mine",
           SCALED),
    Mutant("the factor is not applied", "zero/_step/final_gradients.py", "            self.runtime.reducer.change(grads, self.factor.multiply_)\n",
           "            pass\n", CLIP),
    Mutant("gradients that were clipped are added to as they were before", "zero/_gradients/reducer.py",
           '        """A backward starts."""\n        self.consumer.settle()\n', '        """A backward starts."""\n',
           _of("zero/test_kept_gradients", "test_clipped_gradients_that_are_kept_are_added_to[zero-2]")),
    Mutant("an update that failed on one rank is not noticed", "zero/optimizer.py",
           "runtime.reducer.facts.has_failed = before is not None", "pass",
           _of("zero/test_step_facts", "test_an_update_that_fails_on_one_rank_is_named")),
    Mutant("no_sync without a backward counts as none", "zero/_gradients/reducer.py",
           "self.accumulation.holds_unreduced or not self.reduces_now", "not self.reduces_now",
           _of("zero/test_step_facts", "test_uneven_batches_within_no_sync_are_alike[2]")),
    Mutant("gradients are not forgotten", "zero/_step/final_gradients.py",
           "        for piece in self._pieces:\n            piece.master.grad = None\n", "", _of("zero/test_optimizer", "test_model_zero_grad_clears_too[1]")),
    Mutant("loss scale: window off by one", "zero/_optim/loss_scale.py", "        if self._num_good and self._num_good % self.window == 0:",
           "        if self._num_good and (self._num_good + 1) % self.window == 0:", SCALE),
    Mutant("loss scale: hysteresis is not used up", "zero/_optim/loss_scale.py", "                self._hysteresis_left -= 1\n", "",
           SCALE),
    Mutant("layout: a piece ends one early", "zero/_sharding/layout.py", "min(slot.offset + slot.numel, high)\n",
           "min(slot.offset + slot.numel, high - 1)\n", LAYOUT),
    Mutant("layout: shards of different numbers", "zero/_sharding/layout.py", "        low, high = (0, self.numel) if shard is None else",
           "        shard = None if shard is None else self.world_size - 1 - shard\n        low, high = (0, self.numel) if shard is None else",
           LAYOUT),
    Mutant("checkpoint: skipped checksum of a chunk", "zero/_checkpoint/dcp.py",
           "    if chunk.crc32 is not None and zlib.crc32(data) != chunk.crc32:", "    if False:", DAMAGED),
    Mutant("checkpoint: skipped checksum of the metadata", "zero/_checkpoint/index.py",
           '    if document.get("crc32") != _checksum(content):', "    if False:", DAMAGED),
    Mutant("checkpoint: latest before metadata.json", "zero/_checkpoint/dcp.py",
           PUBLISHED,
           "        if self._moves_latest:\n            replace_file(self._folder.parent / LATEST, latest_line(self._folder.name), self.save_id)\n"
           + PUBLISHED, DAMAGED),
    Mutant("checkpoint: old shards are deleted before the new metadata", "zero/_checkpoint/dcp.py", PUBLISHED,
           "        remove_stale_shards(self._folder, set(files))\n" + PUBLISHED, POWER),
    Mutant("checkpoint: data are not synced", "zero/_checkpoint/durability.py", "            os.fsync(file.fileno())\n", "", POWER),
    Mutant("checkpoint: a renamed file is not synced", "zero/_checkpoint/durability.py", "        raise\n    sync_folder(path.parent)\n",
           "        raise\n", POWER),
    Mutant("checkpoint: shards' names are not synced before the metadata", "zero/_checkpoint/dcp.py",
           "        sync_folder(self._folder)\n", "", POWER),
    Mutant("checkpoint: a new folder is not synced", "zero/_checkpoint/durability.py", "    for path in missing:\n",
           "    for path in ():\n", POWER),
    Mutant("checkpoint: a tag's folder is not synced before latest", "zero/_checkpoint/dcp.py",
           "            make_folder(self._folder)\n", "            self._folder.mkdir(parents=True, exist_ok=True)\n", POWER),
    Mutant("checkpoint: each rank reads latest", "zero/_checkpoint/load.py",
           'if ranks.rank == 0 else None, ranks, trouble)\n        tag = share_text(latest or "", 0, ranks) or None\n',
           "if ranks.rank >= 0 else None, ranks, trouble)\n        tag = latest\n", SAME),
    Mutant("checkpoint: other contents on other ranks", "zero/_checkpoint/load.py", "not control.are_equal(digest, ranks)", "False", SAME),
    Mutant("checkpoint: other tags on other ranks", "zero/_checkpoint/load.py",
           '    check_same_on_ranks(asked, ranks, "ask for the same", "pass the same tag and load_* arguments everywhere")\n', "", SAME),
    Mutant("checkpoint: shards that the first rank does not see", "zero/_checkpoint/dcp.py", "                self._check_visible(files)\n",
           "", _of(TOGETHER, "test_a_folder_that_ranks_do_not_share_is_told_when_saving")),
    Mutant("checkpoint: python's second normal number is lost", "zero/_checkpoint/snapshot.py", "tuple(numbers.tolist()), gauss))",
           "tuple(numbers.tolist()), None))", _of(TOGETHER, "test_generators_go_on_with_every_number")),
    Mutant("checkpoint: nothing is proven", "zero/_checkpoint/dcp.py", "            self._check(read_index(path.parent, path.name))\n",
           "            pass\n", _of(CONTENTS, "test_what_could_not_be_loaded_replaces_nothing")),
    Mutant("checkpoint: empty tensors leave no trace", "zero/_checkpoint/dcp.py", "            yield 0, 0\n", "            pass\n",
           _of(CONTENTS, "test_nothing_is_too_small_or_too_odd_to_be_loaded_again")),
    Mutant("checkpoint: two optimizers, one tag", "zero/_checkpoint/dcp.py", "                self._check_own()\n", "", TWO),
    Mutant("checkpoint: the checkpoints of two optimizers are told apart by nothing", "zero/_checkpoint/dcp.py",
           "if since_ns != self._since_ns and", "if since_ns == self._since_ns and", TWO),
    Mutant("checkpoint: a load is no new beginning", "zero/_checkpoint/restore.py",
           "    internals.runtime.since_ns = time.time_ns()\n", "", TWO),
    Mutant("checkpoint: objects keep what a failed load gave them", "zero/_checkpoint/restore.py",
           "            self.put_back(ranks, error)\n", "", RAISES),
    Mutant("checkpoint: gradients that are held are not asked for", "zero/_checkpoint/save.py",
           "    _check_between_steps(optimizer)\n", "",
           _of("zero/test_save_within_step", "test_what_is_saved_within_a_step_is_the_state_after_the_last[stage 1]")),
    Mutant("checkpoint: a step that was broken off by a save is not run again", "zero/engine.py",
           "        counts[\"micro_steps\"] -= self._engine._steps_in_window\n", "",
           _of("zero/test_save_within_step", "test_what_is_saved_within_a_step_is_the_state_after_the_last[stage 1]")),
    Mutant("gradients that are not reduced are read as this rank's own", "zero/_access/safe_access.py",
           '    all_reduce(mean, runtime.reducer.reduction.op, group=runtime.topology)\n', "",
           _of("zero/test_fragments", "test_gradients_that_are_not_reduced_yet_are_read_as_their_mean[1]")),
    Mutant("a folder of something else is a fresh start", "zero/_checkpoint/load.py",
           "        agreed(lambda: check_nothing_else(Path(load_dir)), ranks, f\"{load_dir} cannot be listed\")\n", "",
           _of("zero/test_checkpoint_failures", "test_what_else_is_in_the_place_of_checkpoints_is_no_fresh_start")),
    Mutant("weights alone: an engine's own state is asked for", "zero/_checkpoint/load.py",
           "stateful is None or load_module_only else", "stateful is None else",
           _of("zero/test_checkpoint", "test_an_engine_loads_weights_alone[0]")),
    Mutant("a wrong configuration ends the engine that a model has", "zero/compat/parameters.py",
           "            on_every_rank(check, owner.topology)\n", "",
           _of("zero/test_compat_config", "test_a_wrong_configuration_leaves_the_engine_alone[0]")),
    Mutant("one rank loads alone inside a block of other parameters", "zero/_runtime/gathered_edits.py",
           "bool(editable) and editable >= set(params)", "bool(editable)",
           _of("zero/test_state_dict", "test_a_load_half_inside_a_block_reaches_every_rank[3-float32]")),
    Mutant("a load inside a block is an edit: masters stay where values are equal", "zero/_runtime/gathered_edits.py",
           "torch.tensor([param in self._loaded for param in params], dtype=torch.int64)",
           "torch.zeros(len(params), dtype=torch.int64)",
           _of("zero/test_state_dict", "test_masters_follow_a_load_inside_a_block[options2-dtype2-False]")),
    Mutant("edits of a block are lost by a collective load in it", "zero/_access/state_dict.py",
           "                    edits.adopt_so_far()\n", "",
           _of("zero/test_state_dict", "test_a_load_half_inside_a_block_reaches_every_rank[0-bf16]")),
    Mutant("bytes of a parameter: gathers are those of the formula, at most", "zero/_runtime/bytes_by_parameter.py",
           "    if counts is None:\n", "    if True:\n",
           _of("zero/test_bytes_by_parameter", "test_bytes_add_up_to_those_of_a_step_on_every_link")),
    Mutant("checkpoint: an optimizer that is half loaded goes on", "zero/_checkpoint/restore.py", "        internals.fail(error)\n", "",
           _of(TOGETHER, "test_a_load_that_fails_half_way_ends_the_optimizer_on_every_rank")),
    Mutant("states of any form are taken", "zero/_runtime/validate.py", "    check_states(trial, device, is_whole=is_whole)\n", "",
           _of(CONTENTS, "test_states_that_no_checkpoint_could_hold_are_refused_before_training")),
    Mutant("changes auto: exact for parameters of any width", "zero/_runtime/validate.py", "(param.dtype not in ulps.DTYPES or param.device.type", "(param.device.type",
           _of("zero/test_exact_replicas", "test_it_is_the_default_for_16_bit_parameters_in_host_memory")),
    Mutant("delta_hpz: frozen parameters must have 16 bits, too", "zero/_modes/delta_hpz.py",
           "format if bucket.is_trainable else CHANGE_FORMAT", "format",
           _of("zero/test_exact_replicas", "test_it_is_the_default_for_16_bit_parameters_in_host_memory")),
    Mutant("stacks: parts are laid out in the order of their placement", "zero/_model/model_layout.py", "tuple(sorted(of_one)) for",
           "tuple(of_one) for", _of("zero/test_stacked_tensors", "test_as_one_process_with_a_parameter_for_each[4-2]")),
    Mutant("stacks: a checkpoint has a number for each part", "zero/_checkpoint/flat_parts.py", "if key not in numbers:", "if True:",
           _of("zero/test_stacked_tensors", "test_checkpoints_move_between_stages_and_placements[adafactor]")),
    Mutant("joint update: what has no gradient is updated", "zero/_step/joint_update.py", "if master.grad is not None:", "if True:",
           _of("zero/test_joint_update", "test_unused")),
    Mutant("joint update: narrow parameters are not written", "zero/_step/joint_update.py", "one.piece.bucket.update_shard()", "pass",
           _of("zero/test_joint_update", "test_16_bit_parameters[2]")),
    Mutant("joint update: gradients are not unscaled", "zero/_step/joint_update.py", "wide.mul_(factor)", "pass",
           _of("zero/test_joint_update", "test_scaled_and_with_states_in_host_memory[CPUAdam]")),
    Mutant("joint update: allocates between exchanges", "zero/_step/joint_update.py",
           "torch.addmm(gram[own], gram[own], gram, beta=b, alpha=c, out=mixed)",
           "mixed = torch.addmm(gram[own], gram[own], gram, beta=b, alpha=c)",
           _of("zero/test_joint_update", "test_an_error_on_one_rank_is_raised_on_all[device]")),
    Mutant("nested states: a failed step in files has changed them", "zero/_optim/file_update.py", "copy.deepcopy(value)  #", "value  #",
           _of("zero/test_nested_states", "test_a_failed_step_leaves_them")),
    Mutant("files: every sub-group counts, not those that were written", "zero/_optim/file_update.py", "self._files.commit(self._done)",
           "self._files.commit(self._files.groups)", _of("zero/test_state_tiers", "test_what_a_step_does_not_use_stays_as_it_is_in_files")),
    Mutant("delayed update: a rate in a tensor is not copied", "zero/_optim/delayed_update.py", "value.clone() if isinstance(value, Tensor) else value for",
           "value for", _of("zero/test_delayed_update", "test_a_rate_in_a_tensor_counts_as_it_was_when_the_step_was_decided")),
    Mutant("dataloader: passes begin again", "zero/engine.py", '"num_passes" in state:', '"passes" in state:',
           _of("zero/test_initialize", "test_passes_over_the_data_go_on_after_a_load")),
    Mutant("checkpoint: a link is refused without its remedy", "zero/_checkpoint/durability.py", "    if path.is_symlink():\n",
           "    if False:\n", LINKS),
    Mutant("checkpoint: links are followed", "zero/_checkpoint/durability.py", IS_LINK + OPENED + " | os.O_NOFOLLOW", OPENED, LINKS),
    Mutant("checkpoint: the last chunk of a part is left out", "zero/_checkpoint/dcp.py",
           "        while start < stop:\n", "        while start < stop - 1:\n", RESUMED),
    Mutant("device: a query in a capture", "cpp/nccl/communicator.cc", "  if (!is_captured) Poll();", "  Poll();",
           _checked("CheckCapture")),
    Mutant("device: a missing wait for the stage before", PIPELINE,
           "    device_->Wait(stream, DoneOf(plan, stage - 1, chunk.index));\n", "", _checked("CheckBits")),
    Mutant("device: a missing wait for the slot", PIPELINE,
           "      device_->Wait(stream, DoneOf(plan, last, chunk.index));", "      static_cast<void>(last);", _checked("CheckBits")),
    Mutant("device: a missing wait of the caller", PIPELINE,
           "    device_->Wait(caller, DoneOf(plan, num_stages - 1, num_chunks - 1));", "   ", _checked("CheckBits")),
    Mutant("device: a wrong stream", PIPELINE, "  plan.stages[stage].queue(chunk, stream);\n",
           "  plan.stages[stage].queue(chunk, streams_[0]);\n", _checked("CheckBits")),
    Mutant("device: an event on the wrong stream", PIPELINE, "  device_->Record(DoneOf(plan, stage, chunk.index), stream);\n",
           "  device_->Record(DoneOf(plan, stage, chunk.index), caller);\n", _checked("CheckBits")),
    Mutant("device: a chunk left over", PIPELINE, "  const std::size_t num_chunks = plan.num_chunks();\n",
           "  const std::size_t num_chunks = std::max<std::size_t>(1, plan.numel / plan.chunk_numel);\n", _checked("CheckBits")),
    Mutant("device: one launch too many", PLANS,
           "void DecodeToRows(const Draft& draft, const MessageLayout& layout, std::size_t hop, const Chunk& chunk,\n"
           "                  const std::uint8_t* messages, std::size_t num_locals, std::size_t num_nodes, const CallRows& rows,\n"
           "                  Stream stream) {\n  std::uint8_t* data = At(rows.data, rows.dtype, chunk.begin);\n",
           "void DecodeToRows(const Draft& draft, const MessageLayout& layout, std::size_t hop, const Chunk& chunk,\n"
           "                  const std::uint8_t* messages, std::size_t num_locals, std::size_t num_nodes, const CallRows& rows,\n"
           "                  Stream stream) {\n  std::uint8_t* data = At(rows.data, rows.dtype, chunk.begin);\n"
           "  draft.kernels->Decode(layout, draft.In(layout, hop, chunk, messages, 1), {rows.dtype, data, 0, 0}, nullptr, stream);\n",
           _checked("CheckLaunches")),
    Mutant("device: trailers are not cleared", PLANS, "IsBlockCodec(sizes.wires[hop].codec) ? Expected{data, count} : Expected{}",
           "count > 1000000 ? Expected{data, count} : Expected{}", _checked("CheckShortMessages")),
    Mutant("device: what is stuck is not aborted", "cpp/nccl/communicator.cc",
           "  if (queueing_deadline != 0 && Clock::now()", "  if (queueing_deadline == 1 && Clock::now()", _checked("CheckStuckCalls"), hangs=True),
    Mutant("device: of two hops the first is aborted first", "cpp/nccl/communicator.cc",
           "hops_[is_outward ? hops_.size() - 1 - i : i]->Abort();", "hops_[is_outward ? i : hops_.size() - 1 - i]->Abort();",
           _checked("CheckOrderOfAborts")),
    Mutant("device: what is made of a refused message has an earlier trailer", "cpp/nccl/host_device.cc",
           "      ClearTrailers(out_layout, output);  //", "      //", ("cpp/tests/emulated_nccl_test.cc::",)),
    Mutant("device: what is made of a refused message has a hash", "cpp/cuda/kernels.h",
           "is_refused ? 0U : a.output.hash", "is_refused && false ? 0U : a.output.hash", ("cpp/tests/cuda_kernels_test.cc::",)),
    Mutant("streams: a missing record_stream", "zcomm/_transport/work.py", "                    tensor.record_stream(stream)\n",
           "                    pass\n", STREAMS),
    Mutant("streams: a missing wait for the current one", "zcomm/_transport/work.py",
           "        stream.wait_stream(current)  # P1: streams are not ordered by default\n", "", STREAMS),
    Mutant("streams: a wrong stream", "zcomm/_transport/work.py", "        torch.cuda.set_stream(self._stream)\n", "        pass\n", STREAMS),
    Mutant("streams: the side stream stays the current one", "zcomm/_transport/work.py", "        torch.cuda.set_stream(self._before)\n",
           "        pass\n", STREAMS),
    Mutant("streams: nobody waits for the side stream", "zcomm/_transport/work.py", "            self._event.wait(torch.cuda.current_stream(torch.cuda.current_device()))\n", "            pass\n", STREAMS),
    Mutant("flag: a query in a capture", ON_FLAGS, "        if self.is_capturing():\n            return\n", "", FLAGS),
    Mutant("flag: first made in a capture", ON_FLAGS, "        if self.is_capturing():\n            raise", "        if False:\n            raise",
           _of("zcomm/test_message_flags", "test_a_flag_is_not_first_made_in_a_capture")),
    Mutant("flag: a copy for each decode", ON_FLAGS, "        if self.clock() >= self._next:\n", "        if True:\n",
           _of("zcomm/test_message_flags", "test_a_decode_on_a_gpu_is_one_launch")),
    Mutant("one launch too many: trailers are cleared by one of their own", "zcomm/_collectives/all_gather.py",
           "    messages = layout.new(hop.size, shard.device)\n", "    messages = layout.new_to_receive(hop.size, shard.device)\n", LAUNCHES),
    Mutant("one launch too many: a sum is decoded twice", RS, "    kernels.decode_sum(last, between, output, 0, divisor / inside)\n",
           "    kernels.decode_sum(last, between, output, 0, divisor / inside)\n    kernels.decode_sum(last, between, output, 0, divisor / inside)\n", LAUNCHES),
    Mutant("split sizes: a rank that refuses its own is silent", UNEVEN,
           "        _gather_sizes([REFUSED] * (2 * call.hop.size), source.dtype, call)  # I1: the other ranks raise, too\n", "",
           _of("zcomm/test_split_sizes", "test_so_is_wrong_memory"), hangs=True),
    Mutant("split sizes: those of two ranks are not compared", UNEVEN, "(sent != expected.t())", "(sent != sent)",
           _of("zcomm/test_split_sizes", "test_what_does_not_fit_between_ranks_is_the_same_error_on_all"), hangs=True),
    Mutant("split sizes: formats are not compared", UNEVEN, 'f"{dtype} {call.format}"', 'f"{dtype}"',
           _of("zcomm/test_split_sizes", "test_what_does_not_fit_between_ranks_is_the_same_error_on_all"), hangs=True),
    Mutant("split sizes: parts draw the same random numbers", UNEVEN, "0, call.hop.rank, first)", "0, call.hop.rank, 0)",
           _of("zcomm/test_split_sizes", "test_random_numbers_follow_the_place_in_the_input")),
    Mutant("split sizes: control exchanges do not wait for them", UNEVEN, "group.uses_world = True", "group.uses_world |= False",
           _of("zcomm/test_split_sizes", "test_exchanges_over_the_same_ranks_keep_their_order"), hangs=True),
    Mutant("lists: the padding has a block's other values", "zcomm/_collectives/coalesced.py",
           "        numel, period = numel + missing, block\n", "        numel, period = numel + missing, 1\n",
           _of("zcomm/test_lists", "test_bits_are_those_of_a_call_for_each_tensor")),
    Mutant("lists: other lists of the same length match", "zcomm/_collectives/coalesced.py", "zlib.crc32(repr(columns).encode())", "0",
           _of("zcomm/test_lists", "test_other_lists_of_the_same_length_are_found")),
    Mutant("gradients: a mean is not divided", "zcomm/functional.py", "grad / divisor_of(op, world_size)", "grad",
           _of("zcomm/test_gradients", "test_gradients_are_those_of_the_formula_in_one_process")),
    Mutant("gradients: the format of backward is lost", "zcomm/functional.py", "_format_text(_formats_of(format)[1])", '"none"',
           _of("zcomm/test_gradients", "test_backward_exchanges_in_grad_format")),
    Mutant("coded: nothing is kept of what was rounded off", "zcomm/_stateful/coded_sums.py",
           "residual.keep_difference(row.view(1, -1), decoded.view(1, -1), start)", "pass",
           _of("zcomm/test_coded_sums", "test_what_is_rounded_off_comes_in_later_steps")),
    Mutant("coded: ranks with other errors", "zcomm/_stateful/coded_sums.py", 'f"local, error {self._relative_error!r}"', '"local"',
           _of("zcomm/test_coded_sums", "test_ranks_with_different_errors_are_found")),
    Mutant("coded: one step for a row", "zcomm/_kernels/grid.py", "BLOCK = 128\n", "BLOCK = 4096\n",
           _of("zero/test_gradient_error", "test_each_parameter_has_the_error_and_takes_the_bytes_of_the_plan")),
    Mutant("exact: all of the room is sent", "zcomm/_transport/backend.py", "[part[:n] for part, n in zip(sent, used, strict=True)]", "sent",
           _of("zcomm/test_exact_changes", "test_messages_are_sent_as_long_as_they_are")),
    Mutant("exact: the hop inside the node sends one message", CHANGES, "                room = room[nbytes:]\n", "", EXACT_BITS),
    Mutant("exact: checksums of what was in the room before", CHANGES, "for part in (mine[used:], *received):", "for part in received:",
           _of("zcomm/test_exact_changes", "test_damage_is_the_same_error_on_every_rank")),
    Mutant("exact: a shard that changes while it is sent", CHANGES, "        return self._send(message, used)\n",
           "        yield from self._send(message, used)\n",
           _of("zcomm/test_exact_changes", "test_the_next_values_may_be_written_while_a_message_is_in_flight")),
    Mutant("coder: a checksum is not compared", "cpp/src/ulps.cc", '  ZCOMM_CHECK(checksum == head.checksum, "checksum of a message must match");\n', "",
           ("cpp/tests/ulps_test.cc::CheckDamage",)),
    Mutant("coder: sizes of chunks are believed", "cpp/src/ulps.cc",
           '  ZCOMM_CHECK(sum == end - kUlpsHeadNbytes - 4 * num_chunks, "sizes of chunks must add up");\n', "",
           ("cpp/tests/ulps_test.cc::CheckHostile",)),
    Mutant("publish: a publication whose files the first rank does not see", PUBLISHER, "            _check_visible(path, results)\n", "",
           _of("zero/test_publish_faults", "test_a_folder_that_ranks_do_not_share_is_named")),
    Mutant("publish: named before its files are synced", PUBLISHER, "            sync_folder(path)\n            path.rename", "            path.rename",
           _of("zero/test_publish_faults", "test_what_is_on_the_disk_when_the_power_fails_can_be_read")),
    Mutant("publish: done before its name is synced", PUBLISHER,
           "            path.rename(publication_path(self._folder, manifest.number))\n            sync_folder(self._folder)\n",
           "            path.rename(publication_path(self._folder, manifest.number))\n",
           _of("zero/test_publish_faults", "test_what_is_on_the_disk_when_the_power_fails_can_be_read")),
    Mutant("publish: the next patch is one on values that nobody has", PUBLISHER,
           " if self._last is not None and numbers[-1:] == [self._last.number] else None", " if self._last is not None else None",
           _of("zero/test_publish_faults", "test_a_failed_fsync_is_raised_and_the_next_publication_is_right[4]",
               "test_a_failed_fsync_is_raised_and_the_next_publication_is_right[3]")),
    Mutant("publish: two runs share a folder", PUBLISHER, "            if run != self.run:\n                raise", "            if False:\n                raise",
           _of("zero/test_publish_faults", "test_two_publishers_in_one_folder")),
    Mutant("subscribe: digests of a patch are not computed", SUBSCRIBER, "digests[change.number] = _digest_of(new)", "digests[change.number] = change.digest",
           PATCHED),
    Mutant("subscribe: weights are written before all of a patch is verified", SUBSCRIBER,
           "            values.append((chunk, new))\n        if root_of(digests)",
           "            values.append((chunk, new))\n            self._next = _NewVersion(manifest, layout, list(digests), values)\n            self._write()\n        if root_of(digests)",
           PATCHED),
    Mutant("subscribe: an interrupt leaves half a version", SUBSCRIBER, "            except BaseException:\n                self._copy()\n                raise\n",
           "            except BaseException:\n                raise\n", _of("zero/test_publish_faults", "test_an_interrupt_at_any_line_leaves_one_version")),
]  # fmt: skip
