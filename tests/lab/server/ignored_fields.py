"""Fields of FastDeploy that change no token here: they are ignored, as unknown ones are."""

IGNORED = {
    *("request_id", "trace_context", "collect_metrics", "max_streaming_response_tokens", "mm_hashes", "video_fps"),
    *("include_draft_logprobs", "include_logprobs_decode_token", "temp_scaled_logprobs", "top_p_normalized_logprobs"),
}
