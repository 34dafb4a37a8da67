;; A payload function: it hides digits in what clients send. The interface is proxy-wasm ABI 0.2.1.
(module
  ;; get and set take: buffer, start, length, pointer, pointer or length. Buffer 2 is what the client sends.
  (import "env" "proxy_get_buffer_bytes" (func $get (param i32 i32 i32 i32 i32) (result i32)))
  (import "env" "proxy_set_buffer_bytes" (func $set (param i32 i32 i32 i32 i32) (result i32)))
  (import "env" "proxy_close_stream" (func $close (param i32) (result i32)))
  (memory (export "memory") 2)
  (func (export "proxy_abi_version_0_2_1"))

  ;; Sidetrack copies the bytes to where this function says: always to 1024. A call shows at most 64 KiB.
  (func (export "proxy_on_memory_allocate") (param $size i32) (result i32) (i32.const 1024))

  ;; Called with the number of bytes that the client has sent. The answer 0 lets them pass, 1 holds them.
  (func (export "proxy_on_downstream_data") (param $flow i32) (param $size i32) (param $last i32) (result i32)
    (local $at i32) (local $end i32)
    ;; The place of the bytes is stored at 0, their number at 4.
    (drop (call $get (i32.const 2) (i32.const 0) (local.get $size) (i32.const 0) (i32.const 4)))
    (local.set $at (i32.load (i32.const 0)))
    (local.set $end (i32.add (local.get $at) (i32.load (i32.const 4))))
    (block $done
      (loop $byte
        (br_if $done (i32.ge_u (local.get $at) (local.get $end)))
        ;; A zero byte is refused: the connection is reset.
        (if (i32.eqz (i32.load8_u (local.get $at))) (then (drop (call $close (i32.const 2)))))
        ;; '0' to '9' become '*'.
        (if (i32.lt_u (i32.sub (i32.load8_u (local.get $at)) (i32.const 48)) (i32.const 10))
          (then (i32.store8 (local.get $at) (i32.const 42))))
        (local.set $at (i32.add (local.get $at) (i32.const 1)))
        (br $byte)))
    (drop (call $set (i32.const 2) (i32.const 0) (local.get $size) (i32.load (i32.const 0)) (i32.load (i32.const 4))))
    (i32.const 0)))
