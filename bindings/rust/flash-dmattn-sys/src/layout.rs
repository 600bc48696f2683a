// Written by scripts/rust_bindings.py from include/flash_dmattn.h, which is the manual.
layouts! {
    fdm_status 4 4 { }
    fdm_dtype 4 4 { }
    fdm_tune_wish 4 4 { }
    fdm_invariance 4 4 { }
    fdm_pass 4 4 { }
    fdm_memory_tier 4 4 { }
    fdm_tune_state 4 4 { }
    fdm_layout_kind 4 4 { }
    fdm_rank_algorithm 4 4 { }
    fdm_device_id 8 4 { r#type 0 index 4 }
    fdm_data_type 4 2 { code 0 bits 1 lanes 2 }
    fdm_tensor 48 8 { data 0 device 8 ndim 16 dtype 20 shape 24 strides 32 byte_offset 40 }
    fdm_cache 104 8 { struct_bytes 0 rotary_interleaved 4 block_table 8 page_start 16 cache_row 24 lengths 32 first_key 40 k_new 48 v_new 56 cu_seqlens_new 64 rotary_cos 72 rotary_sin 80 rotary_start 88 fault 96 }
    fdm_tensors 232 8 { struct_bytes 0 q 8 k 16 v 24 mask 32 bias 40 interval_start 48 interval_end 56 cu_seqlens_q 64 cu_seqlens_k 72 out 80 lse 88 dout 96 dlse 104 dq 112 dk 120 dv 128 dbias 136 lse_low 144 sink 152 dsink 160 seqused_q 168 seqused_k 176 cache 184 row_start 192 row_end 200 block_mask 208 mask_plan 216 tree 224 }
    fdm_options 160 8 { struct_bytes 0 has_softmax_scale 4 causal 8 deterministic 12 softmax_scale 16 softcap 24 window_left 32 window_right 40 max_seqlen_q 48 max_seqlen_k 56 num_threads 64 kernel 72 family 80 executor 88 stream 96 lse_without_sink 104 tune 112 add_dkv 120 sm_margin 128 invariance 136 num_splits 144 split_keys 152 }
    fdm_executor 24 8 { context 0 num_threads 8 run 16 }
    fdm_allocator 24 8 { context 0 allocate 8 release 16 }
    fdm_merge_tensors 80 8 { struct_bytes 0 out1 8 lse1 16 lse_low1 24 out2 32 lse2 40 lse_low2 48 out 56 lse 64 lse_low 72 }
    fdm_problem 400 8 { pass 0 dtype 4 batch 8 heads 16 heads_kv 24 seqlen_q 32 seqlen_k 40 head_dim 48 head_dim_v 56 total_q 64 total_k 72 softmax_scale 80 softcap 88 window_left 96 window_right 104 causal 112 varlen 116 deterministic 120 needs_lse 124 needs_dq 128 needs_dk 132 needs_dv 136 needs_dbias 140 has_dlse 144 has_lse_low 148 has_intervals 152 has_mask 156 has_bias 160 bias_dtype 164 interval_batch 168 interval_heads 176 mask_shape 184 bias_shape 216 aligned 248 scores_aligned 252 q_mappable 256 keys_mappable 260 scores_mappable 264 has_sink 268 needs_dsink 272 sink_dtype 276 num_sinks 280 lse_without_sink 284 has_seqused_q 288 has_seqused_k 292 new_rows 296 has_cache 304 page_size 308 num_pages 312 max_pages 316 ragged_pages 320 has_first_key 324 has_cache_row 328 rotary_dim 332 rotary_interleaved 336 dkv_float32 340 add_dkv 344 has_row_intervals 348 row_interval_batch 352 row_interval_heads 360 row_ranges 368 invariance 372 num_splits 376 split_keys 380 block_mask_size 384 block_mask_batch 388 block_mask_heads 392 has_tree 396 value_in_key 397 reserved 398 }
    fdm_device 216 8 { struct_bytes 0 id 4 present 12 name 16 isa 80 isa_by_name 112 num_threads 144 compute_major 148 compute_minor 152 num_sms 156 registers_per_sm 160 threads_per_sm 164 nvrtc_version 168 l1_bytes 176 l2_bytes 184 l3_bytes 192 shared_bytes 200 bandwidth 208 }
    fdm_arch_config 40 8 { struct_bytes 0 tier 4 async_copy 8 float8 12 bulk_copy 16 warpgroup_mma 20 tensor_memory 24 shared_bytes 32 }
    fdm_plan 1160 8 { struct_bytes 0 problem 8 device 408 family 416 kernel 432 choice 480 kernel_index 544 block_m 548 block_n 552 stages 556 v_in_registers 560 num_threads 564 shared_bytes 568 workspace_bytes 576 parameters 584 reason 648 }
    fdm_prediction 216 8 { struct_bytes 0 num_samples 4 seconds 8 residual 16 features 24 name 88 }
    fdm_kernel_info 40 8 { struct_bytes 0 pass 4 family 8 name 16 description 24 available 32 device_type 36 }
    fdm_launch 24 8 { struct_bytes 0 stream 8 executor 16 }
    fdm_kernel_resources 120 8 { struct_bytes 0 threads 4 registers 8 spill_bytes 12 blocks_per_sm 16 warps_per_sm 20 max_warps 24 entry 28 bound 76 shared_bytes 112 }
    fdm_tune_options 64 8 { struct_bytes 0 exhaustive 4 compile_only 8 max_variants 12 rounds 16 keep 20 seconds 24 window 32 progress 40 context 48 stream 56 }
    fdm_tune_row 448 8 { struct_bytes 0 state 4 kernel 8 choice 56 is_rule 120 num_samples 124 num_threads 128 reserved 132 seconds 136 quartile_low 144 quartile_high 152 difference 160 samples 168 why 288 }
    fdm_tune_result 40 8 { struct_bytes 0 num_rows 4 best 8 num_places 12 compile_seconds 16 device_seconds 24 kept 32 reserved 36 }
    fdm_kept_choice 1544 8 { struct_bytes 0 num_samples 4 num_threads 8 reserved 12 kernel 16 choice 64 rule_kernel 128 rule_choice 176 seconds 240 rule_seconds 248 date 256 key 264 maker 1160 file 1288 ignored 1416 }
    fdm_key_rules 64 8 { struct_bytes 0 document_ids 8 prefix_lengths 16 window_sizes 24 interval_start 32 interval_end 40 cu_seqlens_q 48 cu_seqlens_k 56 }
    fdm_topk_slots 48 8 { struct_bytes 0 key 8 bias 16 length 24 k 32 v 40 }
    fdm_tile_plan 480 8 { struct_bytes 0 reserved 4 memory 8 memory_bytes 16 device 24 batches 32 heads 40 row_tiles 48 key_words 56 seen 64 full 72 problem 80 }
    fdm_append_tensors 80 8 { struct_bytes 0 k 8 v 16 cache 24 slots 32 positions 40 q 48 cu_seqlens_q 56 q_out 64 stream 72 }
    fdm_setting_info 96 8 { struct_bytes 0 valid 4 name 8 description 72 allowed 80 value 88 }
    fdm_cache_info 800 8 { struct_bytes 0 num_ignored 4 folder 8 num_entries 520 bytes 528 limit_bytes 536 ignored 544 }
    fdm_companion_choice 752 8 { device 0 kernel 8 choice 56 kernel_index 120 parameters 124 shared_bytes 160 workspace_bytes 168 reason 176 reserved 688 }
    fdm_softmax_tensors 48 8 { struct_bytes 0 x 8 mask 16 out 24 dout 32 dx 40 }
    fdm_softmax_options 40 8 { struct_bytes 0 log 4 scale 8 kernel 16 stream 24 tune 32 }
    fdm_softmax_problem 104 8 { pass 0 dtype 4 rows 8 columns 16 log 24 has_mask 28 negative_scale 32 aligned 36 reserved 40 }
    fdm_softmax_plan 864 8 { struct_bytes 0 problem 8 choice 112 }
    fdm_gemm_tensors 40 8 { struct_bytes 0 a 8 b 16 c 24 out 32 }
    fdm_gemm_options 48 8 { struct_bytes 0 accumulate_float16 4 alpha 8 beta 16 kernel 24 stream 32 tune 40 }
    fdm_gemm_problem 128 8 { dtype 0 batch 8 m 16 n 24 k 32 a_rows_contiguous 40 b_rows_contiguous 44 has_c 48 accumulate_float16 52 mappable 56 reserved 64 }
    fdm_gemm_plan 888 8 { struct_bytes 0 problem 8 choice 136 }
    fdm_range 16 8 { first 0 end 8 }
    fdm_rank_mask 64 8 { struct_bytes 0 causal 4 seqlen_q 8 seqlen_k 16 window_left 24 window_right 32 num_lists 40 interval_start 48 interval_end 56 }
    fdm_layout_wish 88 8 { struct_bytes 0 kind 4 ranks 8 num_masks 12 total 16 block 24 cu_seqlens 32 num_documents 40 masks 48 weights 56 tolerance 64 ranges 72 range_counts 80 }
    fdm_links 88 8 { struct_bytes 0 ranks_per_node 4 node_bandwidth 8 node_latency 16 net_bandwidth 24 net_latency 32 copy_sms 40 reserved 44 flops 48 memory_bytes 56 host_start 64 host_exchange 72 sums_bandwidth 80 }
    fdm_rank_forecast 96 8 { struct_bytes 0 rank 4 rows 8 pairs 16 keys_fetched 24 node_bytes 32 net_bytes 40 bytes_sent 48 memory_bytes 56 work_seconds 64 exchange_seconds 72 exposed_seconds 80 seconds 88 }
    fdm_ranks_forecast 448 8 { struct_bytes 0 algorithm 4 ranks 8 head_ranks 12 num_sets 16 from_model 20 seconds 24 one_rank_seconds 32 imbalance 40 reason 48 }
    fdm_message 24 8 { peer 0 reserved 4 memory 8 bytes 16 }
    fdm_communicator 64 8 { struct_bytes 0 ranks 4 rank 8 device_type 12 context 16 exchange 24 share 32 poll 40 abort 48 broken 56 reserved 60 }
    fdm_ranks_options 40 8 { struct_bytes 0 rank 4 algorithm 8 all_keys 12 num_threads 16 other_kernel 20 head_ranks 24 sm_margin 28 memory_bytes 32 }
    fdm_ranks_plan_info 336 8 { struct_bytes 0 ranks 4 rank 8 algorithm 12 num_sets 16 num_calls 20 rows 24 keys 32 keys_fetched 40 bytes_received 48 bytes_sent 56 workspace_bytes 64 choice 72 reason 136 }
}
values! {
    FDM_VERSION_MAJOR 0
    FDM_VERSION_MINOR 1
    FDM_VERSION_PATCH 0
    FDM_OK 0
    FDM_ERROR_INVALID_ARGUMENT 1
    FDM_ERROR_UNSUPPORTED 2
    FDM_ERROR_OUT_OF_MEMORY 3
    FDM_ERROR_WORKSPACE 4
    FDM_ERROR_SYSTEM 5
    FDM_ERROR_INTERNAL 6
    FDM_ERROR_REMOTE 7
    FDM_CPU 1
    FDM_CUDA 2
    FDM_FLOAT32 0
    FDM_FLOAT16 1
    FDM_BFLOAT16 2
    FDM_FLOAT64 3
    FDM_BOOL 4
    FDM_INT32 5
    FDM_INT64 6
    FDM_UINT32 7
    FDM_NO_DTYPE -1
    FDM_TUNE_DEFAULT 0
    FDM_TUNE_MEASURE 1
    FDM_TUNE_RULES 2
    FDM_TUNE_PREDICT 3
    FDM_INVARIANCE_NONE 0
    FDM_INVARIANCE_BATCH 1
    FDM_INVARIANCE_SCHEDULE 2
    FDM_FORWARD 0
    FDM_BACKWARD 1
    FDM_MEMORY_LOW 0
    FDM_MEMORY_MEDIUM 1
    FDM_MEMORY_HIGH 2
    FDM_PLAN_PARAMETERS 16
    FDM_PREDICTION_FEATURES 8
    FDM_TUNE_SAMPLES 15
    FDM_TUNE_TIMED 0
    FDM_TUNE_NOT_TIMED 1
    FDM_TUNE_WRONG 2
    FDM_TUNE_FAILED 3
    FDM_LAYOUT_CONTIGUOUS 0
    FDM_LAYOUT_ZIGZAG 1
    FDM_LAYOUT_DOCUMENTS 2
    FDM_LAYOUT_BALANCED 3
    FDM_LAYOUT_RANGES 4
    FDM_RANKS_AUTO 0
    FDM_RANKS_GATHER 1
    FDM_RANKS_ULYSSES 2
    FDM_RANKS_BOTH 3
    FDM_RANKS_RING 4
    FDM_NCCL_ID_BYTES 128
}
exported! {
    fdm_last_error
    fdm_status_name
    fdm_version
    fdm_dtype_name
    fdm_dtype_from_name
    fdm_dtype_of
    fdm_dtype_bytes
    fdm_data_type_of
    fdm_attention_forward
    fdm_attention_backward
    fdm_merge
    fdm_problem_default
    fdm_problem_validate
    fdm_describe
    fdm_device_query
    fdm_device_from_name
    fdm_supports_sm89_features
    fdm_supports_sm90_features
    fdm_arch_optimization_config
    fdm_plan_attention
    fdm_plan_variant
    fdm_plan_predict
    fdm_plan_to_json
    fdm_plan_from_json
    fdm_kernel_list
    fdm_execute
    fdm_prepare
    fdm_plan_resources
    fdm_memory_allocate
    fdm_memory_release
    fdm_memory_copy
    fdm_memory_fill
    fdm_synchronize
    fdm_timer_create
    fdm_timer_start
    fdm_timer_stop
    fdm_timer_release
    fdm_tune
    fdm_tune_kept
    fdm_tune_export
    fdm_tune_import
    fdm_tune_forget
    fdm_key_bias
    fdm_key_bias_backward
    fdm_topk_intervals
    fdm_topk_intervals_workspace
    fdm_document_intervals
    fdm_window_intervals
    fdm_prefix_intervals
    fdm_rule_intervals
    fdm_intervals_from_mask
    fdm_intervals_to_mask
    fdm_mask_blocks
    fdm_blocks_from_lists
    fdm_create_mask
    fdm_topk_fill
    fdm_topk_append
    fdm_count_visible
    fdm_mask_plan_bytes
    fdm_mask_plan
    fdm_cache_append
    fdm_setting_list
    fdm_cache_folder
    fdm_compiler_path
    fdm_cache_query
    fdm_cache_pack
    fdm_shutdown
    fdm_describe_softmax
    fdm_plan_softmax
    fdm_execute_softmax
    fdm_softmax
    fdm_plan_softmax_variant
    fdm_tune_softmax
    fdm_prepare_softmax
    fdm_softmax_kernel
    fdm_describe_gemm
    fdm_plan_gemm
    fdm_execute_gemm
    fdm_gemm
    fdm_plan_gemm_variant
    fdm_tune_gemm
    fdm_prepare_gemm
    fdm_gemm_kernel
    fdm_layout_create
    fdm_layout_release
    fdm_layout_ranges
    fdm_layout_work
    fdm_rank_algorithm_name
    fdm_forecast_ranks
    fdm_plan_ranks
    fdm_ranks_plan_release
    fdm_ranks_plan_query
    fdm_agree
    fdm_execute_ranks
    fdm_wait
    fdm_nccl_communicator
    fdm_nccl_id
    fdm_nccl_communicator_of_id
    fdm_nccl_release
}
